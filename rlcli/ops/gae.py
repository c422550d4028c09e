"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16)
on packed sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcli.ops.packing import action_owner

__all__ = ["gae"]


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    seqlens: Sequence[int],
    bootstrap: torch.Tensor,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of every action, each float32 [T - N]; the inputs are not modified.

    A sequence of L tokens has L - 1 actions: action t is the choice of token t + 1.

        delta_t = r_t + discount * V_{t+1} - V_t
        A_t     = delta_t + discount * gae_lambda * A_{t+1}
        return  = A_t + V_t

    Args:
        rewards: [T - N], the reward of each action.
        values: [T], the value of the state after each token.
        seqlens: N lengths L (in tokens) that add up to T.
        bootstrap: [N] bool. True: the sequence was cut off, and the value of its last state stands
            for what would have followed. False: it ended by itself, so its last state has value 0,
            whatever the critic says.
        discount: the discount factor per token.
        gae_lambda: 1 gives Monte Carlo returns, 0 one-step temporal differences.
    """
    lengths = torch.as_tensor(list(seqlens), dtype=torch.long, device=values.device)
    n_tokens, n_seqs = int(lengths.sum()), lengths.numel()
    if (
        values.shape != (n_tokens,)
        or rewards.shape != (n_tokens - n_seqs,)
        or bootstrap.shape != (n_seqs,)
    ):
        raise ValueError(
            f"{n_seqs} sequences of {n_tokens} tokens need values [{n_tokens}], rewards "
            f"[{n_tokens - n_seqs}] and bootstrap [{n_seqs}], not {tuple(values.shape)}, "
            f"{tuple(rewards.shape)} and {tuple(bootstrap.shape)}"
        )
    last = lengths.cumsum(0) - 1
    is_last = torch.zeros(n_tokens, dtype=torch.bool, device=values.device)
    is_last[last] = True
    state_values = values.to(torch.float64).clone()
    state_values[last] = torch.where(bootstrap.to(values.device), state_values[last], 0.0)
    current = state_values[~is_last]
    following = state_values.roll(-1)[~is_last]
    deltas = rewards.to(torch.float64) + discount * following - current
    owner = action_owner(seqlens, values.device)
    advantages = _discounted_suffix_sums(deltas, owner, discount * gae_lambda)
    return advantages.to(torch.float32), (advantages + current).to(torch.float32)


def _discounted_suffix_sums(x: torch.Tensor, owner: torch.Tensor, decay: float) -> torch.Tensor:
    """y_t = x_t + decay * y_{t+1} within runs of equal `owner`, in log2(longest run)
    vectorised passes.

    After the pass with a given `reach`, y_t covers the 2 * reach entries from t on; so one long
    sequence takes as much work as many short ones, and nothing is padded.
    """
    longest = int(torch.bincount(owner).max()) if owner.numel() else 0
    sums, reach = x, 1
    while reach < longest:
        same = owner[:-reach] == owner[reach:]
        further = torch.where(same, decay * sums[reach:], 0.0)
        sums = torch.cat([sums[:-reach] + further, sums[-reach:]])
        decay, reach = decay * decay, 2 * reach
    return sums
