"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16)
on packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlcli.ops.packing import action_owner

__all__ = ["TurnSteps", "discounted_sums", "gae"]


@dataclass(frozen=True)
class TurnSteps:
    """The turns of episodes, if discounting goes from one to the next."""

    mask: torch.Tensor
    """[T - N] bool: the actions of turns. Those between two turns chose nothing: they were
    observed."""
    discount: float
    """The discount factor from a turn to the next one of its sequence."""

    def begins(self, owner: torch.Tensor) -> torch.Tensor:
        """[T - N] bool: the actions that begin a turn after another one of their sequence.
        `owner`: [T - N], the sequence of each action."""
        steps = self.mask.nonzero().squeeze(1)
        is_next = (steps[1:] > steps[:-1] + 1) & (owner[steps[1:]] == owner[steps[:-1]])
        begins = torch.zeros_like(self.mask)
        begins[steps[1:][is_next]] = True
        return begins


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    seqlens: Sequence[int],
    bootstrap: torch.Tensor,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    turns: TurnSteps | None = None,
    skipped: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of every action, each float32 [T - N]; the inputs are not modified.

    A sequence of L tokens has L - 1 actions: action t is the choice of token t + 1.

        delta_t = r_t + discount * V_{t+1} - V_t
        A_t     = delta_t + discount * gae_lambda * A_{t+1}
        return  = A_t + V_t

    With `turns` only their actions are steps: after the last action of a turn comes the first one
    of the next turn, discounted by `turns.discount` instead, and the advantages of what was
    observed are 0.

    Args:
        rewards: [T - N], the reward of each action.
        values: [T], the value of the state after each token.
        seqlens: N lengths L (in tokens) that add up to T.
        bootstrap: [N] bool. True: the sequence was cut off, and the value of its last state stands
            for what would have followed. False: it ended by itself, so its last state has value 0,
            whatever the critic says.
        discount: the discount factor per token.
        gae_lambda: 1 gives Monte Carlo returns, 0 one-step temporal differences.
        turns: the turns of episodes; None: each action is a step.
        skipped: [T - N] bool, other actions that are no steps; their advantages are 0.
    """
    _check_sizes(rewards, values, seqlens, bootstrap)
    current, final = _state_values(values, seqlens, bootstrap)
    owner = action_owner(seqlens, values.device)
    factors = _discounts(owner, discount, turns)
    steps = _steps(owner, turns, skipped)
    of_step = owner[steps]
    is_final = _is_final(of_step)
    factor = torch.where(is_final, discount, factors[steps].roll(-1))
    following = torch.where(is_final, final[of_step], current[steps].roll(-1))
    deltas = rewards.to(torch.float64)[steps] + factor * following - current[steps]
    advantages = torch.zeros_like(current)
    advantages[steps] = discounted_sums(deltas, of_step, factor * gae_lambda)
    return advantages.to(torch.float32), (advantages + current).to(torch.float32)


def _check_sizes(
    rewards: torch.Tensor, values: torch.Tensor, seqlens: Sequence[int], bootstrap: torch.Tensor
) -> None:
    """Raise ValueError if the shapes are not those of these sequences."""
    n_tokens, n_seqs = sum(seqlens), len(seqlens)
    expected = [(n_tokens,), (n_tokens - n_seqs,), (n_seqs,)]
    if [values.shape, rewards.shape, bootstrap.shape] != expected:
        raise ValueError(
            f"{n_seqs} sequences of {n_tokens} tokens need values [{n_tokens}], rewards "
            f"[{n_tokens - n_seqs}] and bootstrap [{n_seqs}], not {tuple(values.shape)}, "
            f"{tuple(rewards.shape)} and {tuple(bootstrap.shape)}"
        )


def _state_values(
    values: torch.Tensor, seqlens: Sequence[int], bootstrap: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T - N] the values of the states in which actions were chosen, and [N] those of the last
    states, in float64."""
    lengths = torch.as_tensor(list(seqlens), dtype=torch.long, device=values.device)
    last = lengths.cumsum(0) - 1
    is_last = torch.zeros_like(values, dtype=torch.bool)
    is_last[last] = True
    state_values = values.to(torch.float64)
    final = torch.where(bootstrap.to(values.device), state_values[last], 0.0)
    return state_values[~is_last], final


def _discounts(owner: torch.Tensor, discount: float, turns: TurnSteps | None) -> torch.Tensor:
    """[T - N] float64: the factor from the step before to each action."""
    factors = torch.full(owner.shape, discount, dtype=torch.float64, device=owner.device)
    if turns is not None:
        factors[turns.begins(owner)] = turns.discount
    return factors


def _steps(
    owner: torch.Tensor, turns: TurnSteps | None, skipped: torch.Tensor | None
) -> torch.Tensor:
    """[S] the numbers of the actions that are steps."""
    if turns is not None:
        return turns.mask.nonzero().squeeze(1)
    if skipped is not None:
        return (~skipped).nonzero().squeeze(1)
    return torch.arange(len(owner), device=owner.device)


def _is_final(owner: torch.Tensor) -> torch.Tensor:
    """Whether each entry is the last one in its run of equal `owner`."""
    is_final = torch.ones_like(owner, dtype=torch.bool)
    is_final[:-1] = owner[:-1] != owner[1:]
    return is_final


def discounted_sums(x: torch.Tensor, owner: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """y_t = x_t + decay_t * y_{t+1} within runs of equal `owner`, in log2(longest run)
    vectorised passes. All are [n].

    After the pass with a given `reach`, y_t covers the 2 * reach entries from t on; so one long
    sequence takes as much work as many short ones, and nothing is padded.
    """
    longest = int(torch.bincount(owner).max()) if owner.numel() else 0
    sums, reach = x, 1
    while reach < longest:
        same = owner[:-reach] == owner[reach:]
        further = torch.where(same, decay[:-reach] * sums[reach:], 0.0)
        sums = torch.cat([sums[:-reach] + further, sums[-reach:]])
        decay = torch.cat([decay[:-reach] * decay[reach:], decay[-reach:]])
        reach = 2 * reach
    return sums
