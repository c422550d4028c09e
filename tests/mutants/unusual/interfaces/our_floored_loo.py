"""Advantages over the other responses to a prompt, in units of their spread, which has a floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.model import register_interface
from rlcli.ops.advantages import Trajectories
from rlcli.ops.normalization import group_moments
from rlcli.ops.packing import action_owner, summed
from rlcli.ops.reduce import AllReduce

from ._advantages import AdvantageInterface


@dataclass(kw_only=True)
class FlooredLeaveOneOut(AdvantageInterface):
    """What a response earned less the mean of the other responses to its prompt, divided by the
    standard deviation of all of them. The floor keeps groups that differ by almost nothing from
    being blown up."""

    NEEDS_GROUP: ClassVar[Declaration] = {"inference": (..., "2")}
    LIMITS: ClassVar[Limits] = {"scale_floor": {"gt": 0}}

    scale_floor: float = 0.25
    """Least standard deviation that differences are divided by, in units of the reward."""

    adv_norm: bool = False
    """Additionally normalise advantages over the batch's tokens."""

    def estimate(
        self, trajectories: Trajectories, all_reduce: AllReduce
    ) -> tuple[torch.Tensor, torch.Tensor]:
        t = trajectories
        owner, responses = action_owner(t.seqlens, t.mask.device), len(t.seqlens)
        earned = torch.where(t.mask, t.rewards, 0.0)
        outcomes = summed(earned, owner, responses)
        acted = summed(t.mask, owner, responses) > 0
        count, mean, variance = (
            column[t.group] for column in group_moments(outcomes, t.group, acted)
        )
        others = (count - 1).clamp(min=1)
        baseline = (count * mean - outcomes) / others
        lead = torch.where(count > 1, outcomes - baseline, 0.0)
        deviation = (variance * count / others).sqrt()
        scaled = lead / deviation.clamp(min=self.scale_floor)
        advantages = torch.where(t.mask, scaled[owner], 0.0)
        returns = torch.where(t.mask, outcomes[owner], 0.0)
        return advantages.float(), returns.float()


register_interface("our_floored_loo", FlooredLeaveOneOut)
