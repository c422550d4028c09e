"""The share of the group that earned less, minus the share that earned more."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcli.api.model import register_interface
from rlcli.ops.advantages import Trajectories
from rlcli.ops.packing import action_owner
from rlcli.ops.reduce import AllReduce

from ._advantages import AdvantageInterface


@dataclass(kw_only=True)
class RankInGroup(AdvantageInterface):
    """The share of the group that earned less, minus the share that earned more."""

    adv_norm: bool = False
    """Normalise advantages over the batch's tokens."""

    def estimate(
        self, trajectories: Trajectories, all_reduce: AllReduce
    ) -> tuple[torch.Tensor, torch.Tensor]:
        t = trajectories
        owner = action_owner(t.seqlens, t.mask.device)
        zeros = torch.zeros(len(t.seqlens), device=t.mask.device)
        earned = zeros.index_add(0, owner, torch.where(t.mask, t.rewards, 0.0))
        same = t.group[:, None] == t.group[None]
        better = torch.sign(earned[:, None] - earned[None]) * same
        ranks = better.sum(1) / (same.sum(1) - 1).clamp(min=1)
        return ranks[owner], earned[owner]


register_interface("rank_in_group", RankInGroup)
