"""Advantage estimators by name: from finished responses to how much better each action was than expected.

A new one is a function here, and its name in `ADVANTAGE_ESTIMATORS` and `AdvantageEstimatorName`. Its keyword-only
parameters are its settings: whoever calls it by name passes those, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlcli.ops.gae import gae
from rlcli.ops.normalization import group_normalize
from rlcli.ops.packing import action_owner

__all__ = ["ADVANTAGE_ESTIMATORS", "AdvantageEstimator", "AdvantageEstimatorName", "Trajectories"]

AdvantageEstimatorName = Literal["gae", "grpo"]


@dataclass(frozen=True)
class Trajectories:
    """Finished responses: T tokens of N packed sequences, with A = T - N actions (action t chose token t + 1)."""

    rewards: torch.Tensor
    """[A] reward of each action, the KL penalty included; 0 outside of responses."""
    values: torch.Tensor
    """[T] value of the state after each token; zeros where there is no critic."""
    mask: torch.Tensor
    """[A] bool: the actions that chose a token of a response."""
    seqlens: Sequence[int]
    """N lengths in tokens."""
    group: torch.Tensor
    """[N] int64, from 0: the prompt that each sequence answers. Groups never span ranks."""
    bootstrap: torch.Tensor
    """[N] bool: the value of the last state stands for what would have followed."""


AdvantageEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(trajectories, settings by keyword) → advantages [A] and returns [A], both float32. Returns are what a critic learns
to predict. The tensors of the trajectories are left as they are."""


def generalized(trajectories: Trajectories, *, discount: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (`rlcli.ops.gae`): needs a critic, unless `gae_lambda` is 1."""
    t = trajectories
    return gae(t.rewards, t.values, t.seqlens, t.bootstrap, discount, gae_lambda)


def group_relative(trajectories: Trajectories) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO's outcome supervision (arXiv:2402.03300, section 4.1.2): no critic, each response against its group.

        outcome   = sum of the rewards of a response
        advantage = (outcome - mean of its group) / (standard deviation of its group + 1e-6)

    Every action of a response has the advantage of the response, and its outcome as return. The standard deviation is
    the unbiased one, as in verl and TRL; a group of one response has advantage 0. A sequence without an action counts
    for nothing.
    """
    t = trajectories
    owner, n_seqs = action_owner(t.seqlens, t.mask.device), len(t.seqlens)
    zeros = torch.zeros(n_seqs, dtype=torch.float64, device=t.rewards.device)
    outcomes = zeros.index_add(0, owner, torch.where(t.mask, t.rewards, 0.0).to(torch.float64))
    acted = zeros.index_add(0, owner, t.mask.to(torch.float64)) > 0
    relative = group_normalize(outcomes, t.group, acted, unbiased=True, eps=1e-6)
    per_action = torch.stack([relative.to(torch.float64), outcomes])[:, owner]
    advantages, returns = torch.where(t.mask, per_action, 0.0).to(torch.float32)
    return advantages, returns


ADVANTAGE_ESTIMATORS: Mapping[AdvantageEstimatorName, AdvantageEstimator] = {
    "gae": generalized,
    "grpo": group_relative,
}
