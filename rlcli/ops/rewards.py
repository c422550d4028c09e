"""From a score per response to a reward per action."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcli.ops.packing import drop_first, drop_last

__all__ = ["overlong_penalties", "shape_scores", "token_rewards"]


def shape_scores(
    scores: torch.Tensor,
    no_eos: torch.Tensor,
    *,
    scaling: float = 1.0,
    bias: float = 0.0,
    clip: float = 20.0,
    mask_no_eos_with_zero: bool = False,
) -> torch.Tensor:
    """Task scores [N] as used by the algorithm: (score - bias) * scaling, then clipped to ± clip,
    then, with `mask_no_eos_with_zero`, 0 for responses that were cut off (`no_eos`, [N] bool).
    """
    shaped = ((scores.to(torch.float32) - bias) * scaling).clamp(-clip, clip)
    return torch.where(no_eos, 0.0, shaped) if mask_no_eos_with_zero else shaped


def overlong_penalties(lengths: torch.Tensor, limit: int, buffer: int) -> torch.Tensor:
    """[N] from 0 to -1, float32: DAPO's soft punishment (arXiv:2503.14476, eq. 13) of responses of
    `lengths` tokens.

    0 up to limit - buffer tokens; then it falls by 1 / buffer per token,
    down to -1 at and beyond the limit.
    """
    beyond = (lengths.to(torch.float32) - (limit - buffer)) / buffer
    return -beyond.clamp(0, 1)


def token_rewards(
    scores: torch.Tensor,
    kl: torch.Tensor,
    mask: torch.Tensor,
    seqlens: Sequence[int],
    kl_coef: float,
    dense: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reward of each action, [T - N] float32: -kl_coef * kl,
    plus the score on the last action of its sequence.

    Args:
        scores: [N], shaped task scores.
        kl: [T - N], per-token KL from the reference; not read outside `mask`.
        mask: [T - N] bool, actions that belong to the response; all others get reward 0.
        seqlens: N lengths in tokens.
        kl_coef: weight of the KL penalty, at least 0.
        dense: [T - N], further rewards per action (`dense_rewards`), or None.
    """
    rewards = torch.where(mask, -kl_coef * kl, 0.0).to(torch.float32)
    if dense is not None:
        rewards = rewards + torch.where(mask, dense, 0.0)
    actions = torch.as_tensor(list(seqlens), dtype=torch.long, device=mask.device) - 1
    acted = actions > 0
    last = (actions.cumsum(0) - 1)[acted]
    rewards[last] += torch.where(mask[last], scores.to(rewards)[acted], 0.0)
    return rewards


def dense_rewards(
    state_scores: torch.Tensor,
    seqlens: Sequence[int],
    delta: bool,
    scaling: float = 1.0,
    clip: float = 20.0,
) -> torch.Tensor:
    """Rewards per action, [T - N], from a score after each token, [T].

    With `delta`, an action earns the change that it made, (score after it - score before it) *
    scaling, so that the rewards of a response add up to its final score minus the prompt's; without
    it, the score after it. Clipped to ± clip.
    """
    after = drop_first(state_scores, seqlens).to(torch.float32)
    earned = after - drop_last(state_scores, seqlens) if delta else after
    return (earned * scaling).clamp(-clip, clip)
