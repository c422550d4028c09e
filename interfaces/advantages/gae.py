"""Advantages relative to a critic's values: generalised advantage estimation, as in PPO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits, Needs
from rlcli.api.model import register_interface
from rlcli.api.synonyms import Synonyms
from rlcli.ops.advantages import Trajectories, generalized
from rlcli.ops.normalization import group_normalize
from rlcli.ops.packing import action_owner
from rlcli.ops.reduce import AllReduce

from .._advantages import AdvantageInterface


@dataclass(kw_only=True)
class GAEInterface(AdvantageInterface):
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438;
    `rlcli.ops.gae`)."""

    READS: ClassVar[Declaration] = {"inference": (..., "values unless disable_value")}
    NEEDS_GROUP: ClassVar[Declaration] = {"inference": (..., "2 if group_adv_norm")}
    LIMITS: ClassVar[Limits] = {
        "discount": {"ge": 0, "le": 1},
        "turn_discount": {"ge": 0, "le": 1},
        "gae_lambda": {"ge": 0, "le": 1},
    }
    NEEDS: ClassVar[Needs] = {"group_adv_norm": "adv_norm"}
    SYNONYMS: ClassVar[Synonyms] = {
        "gae_lambda": "lam lambd lmbda gae_lam",
        "discount": "gamma",
    }

    discount: float = 1.0
    """Discount factor per token."""

    turn_discount: float | None = None
    """Discount factor from a turn of an episode to the next, instead of `discount` for each token
    that was observed between them; `gae_lambda` counts no step there either. null: `discount`."""

    gae_lambda: float = 1.0
    """Trade-off between bias and variance of advantages: 1 uses all rewards to the end, 0 only the
    next one and the critic's value after it."""

    group_adv_norm: bool = False
    """Normalise advantages over the tokens of the responses to one prompt,
    instead of over the batch."""

    disable_value: bool = False
    """Train without a critic: all values are 0, advantages are the future rewards. As there are no
    values to take their place, `gae_lambda` discounts them too: leave it at 1."""

    bootstrap_no_eos: bool = True
    """For a response that was cut off, the critic's value of its last state replaces the missing
    rest. If cut-off responses are also scored, both are added; if most responses are cut off,
    values can diverge, and this should be false."""

    def values(self, data: SequenceSample) -> torch.Tensor:
        return super().values(data) if self.disable_value else data.data["values"]

    def estimate(
        self, trajectories: Trajectories, all_reduce: AllReduce
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.bootstrap_no_eos:
            trajectories = replace(trajectories, bootstrap=torch.zeros_like(trajectories.bootstrap))
        return generalized(
            trajectories,
            discount=self.discount,
            gae_lambda=self.gae_lambda,
            turn_discount=self.turn_discount,
        )

    def normalize(
        self,
        advantages: torch.Tensor,
        trajectories: Trajectories,
        trained: torch.Tensor,
        all_reduce: AllReduce,
    ) -> torch.Tensor:
        if not self.group_adv_norm:
            return super().normalize(advantages, trajectories, trained, all_reduce)
        group = trajectories.group[action_owner(trajectories.seqlens, trained.device)]
        return group_normalize(advantages, group, trained)


register_interface("gae", GAEInterface)
