"""fsdp with other defaults."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.api.model import register_backend

from .fsdp import FSDP


@register_backend("small_steps")
@dataclass(frozen=True, kw_only=True)
class SmallSteps(FSDP):
    """Learns slowly, and decays nothing."""

    lr: float = 1e-7
    """Peak learning rate of AdamW."""

    weight_decay: float = 0.0
    """Decoupled weight decay of matrices."""
