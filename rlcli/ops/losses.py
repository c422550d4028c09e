"""Losses as sums over tokens. Whoever calls them divides by the number of tokens, over all ranks.

Tokens outside `mask` are never read: their entries may be NaN or Inf, and they receive no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["behaviour_weights", "nll_loss", "ppo_actor_loss", "ppo_critic_loss"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before `exp`, so that one freak token cannot make the loss infinite."""

HUBER_DELTA = 10.0


def nll_loss(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the tokens that `mask` keeps, summed. Both [n]."""
    return -logprobs[mask].sum()


def ppo_actor_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    eps_clip: float,
    c_clip: float | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped loss (arXiv:1707.06347 eq. 7), with dual clip (arXiv:1912.09729 eq. 5); all tensors [n].

        ratio = exp(logprobs - old_logprobs)
        loss  = max(-A * ratio, -A * clip(ratio, 1 - eps_clip, 1 + eps_clip))
        loss  = min(loss, c_clip * |A|)        where A < 0, if c_clip is given

    `weights` (from `behaviour_weights`) multiply each token's loss. Returns the sum over `mask` and, summed
    likewise: `importance_ratio`, `approx_kl` (k1 from the old to the new policy), `clip_fraction` and
    `dual_clip_fraction` (tokens whose gradient the clip cut off).
    """
    advantages = advantages[mask]
    log_ratio = (logprobs[mask] - old_logprobs[mask]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_clip, 1 + eps_clip)
    loss = torch.maximum(unclipped, clipped)
    dual = torch.zeros_like(loss, dtype=torch.bool)
    if c_clip is not None:
        bound = c_clip * advantages.abs()
        dual = (advantages < 0) & (bound < loss)
        loss = torch.where(dual, bound, loss)
    if weights is not None:
        loss = loss * weights[mask]
    with torch.no_grad():
        stats = {
            "importance_ratio": ratio.sum(),
            "approx_kl": -log_ratio.sum(),
            "clip_fraction": (clipped > unclipped).sum().float(),
            "dual_clip_fraction": dual.sum().float(),
        }
    return loss.sum(), stats


def behaviour_weights(
    proximal_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    mask: torch.Tensor,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the decoupled PPO loss (arXiv:2110.00641): exp(proximal - behaviour); all tensors [n].

    Returns (weights, kept mask). Tokens whose weight is above `cap` leave the mask, hence both the sum and
    the count that it is divided by: dropping them does not shrink the update of the others. Weights off the
    mask are 0.
    """
    log_weights = torch.where(mask, proximal_logprobs - behaviour_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = log_weights.exp().detach()
    kept = mask if cap is None else mask & (weights <= cap)
    return torch.where(kept, weights, 0.0), kept


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

    where `error` is the square ("mse") or twice Huber's function with delta 10 ("huber", the same near 0).
    Returns the sum over `mask` and the sum of `value_clip_fraction`: tokens whose gradient the clip cut off.
    """
    values, old_values, returns = values[mask], old_values[mask], returns[mask]
    change = values - old_values
    near = change.abs() <= value_eps_clip  # there `old_values + change` would differ from `values` by rounding alone
    clipped_values = torch.where(near, values, old_values + change.clamp(-value_eps_clip, value_eps_clip))
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
