"""What a response earned beyond a number that is set."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcli.api.model import register_interface
from rlcli.ops.advantages import Trajectories
from rlcli.ops.packing import action_owner
from rlcli.ops.reduce import AllReduce

from ._advantages import AdvantageInterface


@dataclass(kw_only=True)
class FixedBaseline(AdvantageInterface):
    """What a response earned beyond a number that is set."""

    adv_norm: bool = False
    """Normalise advantages over the batch's tokens."""

    usual: float = 0.5
    """What a response usually earns."""

    def estimate(
        self, trajectories: Trajectories, all_reduce: AllReduce
    ) -> tuple[torch.Tensor, torch.Tensor]:
        t = trajectories
        owner = action_owner(t.seqlens, t.mask.device)
        zeros = torch.zeros(len(t.seqlens), device=t.mask.device)
        earned = zeros.index_add(0, owner, torch.where(t.mask, t.rewards, 0.0))
        return (earned - self.usual)[owner], earned[owner]


register_interface("fixed_baseline", FixedBaseline)
