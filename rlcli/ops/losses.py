"""Losses as sums over tokens. The caller divides them by the number of tokens over all ranks.

Tokens outside `mask` are never read: their entries may be NaN or Inf, and they receive no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["nll_loss", "ppo_critic_loss"]

HUBER_DELTA = 10.0


def nll_loss(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the tokens that `mask` keeps, summed. Both [n]."""
    return -logprobs[mask].sum()


def ppo_critic_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    value_eps_clip: float,
    loss: str = "mse",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Value loss with clipping, as in PPO's reference implementation; all tensors [n].

        clipped = old_values + clip(values - old_values, -value_eps_clip, value_eps_clip)
        loss    = 0.5 * max(error(values - returns), error(clipped - returns))

    where `error` is the square ("mse") or twice Huber's function with delta 10 ("huber", the same
    near 0). Returns the sum over `mask` and the sum of `value_clip_fraction`: tokens whose gradient
    the clip cut off.
    """
    values, old_values, returns = values[mask], old_values[mask], returns[mask]
    change = values - old_values
    # here `old_values + change` would differ from `values` only by rounding
    near = change.abs() <= value_eps_clip
    clipped_values = torch.where(
        near, values, old_values + change.clamp(-value_eps_clip, value_eps_clip)
    )
    unclipped = _value_error(values, returns, loss)
    clipped = _value_error(clipped_values, returns, loss)
    with torch.no_grad():
        stats = {"value_clip_fraction": (clipped > unclipped).sum().float()}
    return torch.maximum(unclipped, clipped).sum(), stats


def _value_error(values: torch.Tensor, returns: torch.Tensor, loss: str) -> torch.Tensor:
    if loss == "mse":
        return 0.5 * (values - returns).square()
    if loss == "huber":
        return F.huber_loss(values, returns.to(values), reduction="none", delta=HUBER_DELTA)
    raise ValueError(f"unknown value loss {loss!r}; choose mse or huber")
