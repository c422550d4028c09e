"""Recomputation of activations in the backward pass, as done by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class RecomputedLayers:
    """The layers of a model whose activations are recomputed."""

    def __init__(self, lm: Any):
        # its name since transformers 5.20
        newest = getattr(lm, "activation_checkpointing_enable", None)
        (newest or lm.gradient_checkpointing_enable)({"use_reentrant": False})
        self._layers: list[nn.Module] = [
            m for m in lm.modules() if getattr(m, "gradient_checkpointing", False)
        ]

    @contextmanager
    def in_training_mode(self) -> Iterator[None]:
        """Set the layers to training mode, in which transformers recomputes them, only while
        gradients are needed: it also means dropout within them, and generation without a cache."""
        for module in self._layers:
            module.training = torch.is_grad_enabled()
        try:
            yield
        finally:
            for module in self._layers:
                module.training = False
