"""Policy losses by name, and the weight that each action has in their sum.

A new loss is a function here, and its name in `POLICY_LOSSES` and `PolicyLossName`; its
keyword-only parameters are its settings. What all losses share is outside of it:
`behaviour_weights`, the entropy bonus, and the `LOSS_AGGREGATIONS`, which determine whether each
token or each response counts equally.

Actions outside `mask` are never read: their entries may be NaN or Inf,
and they receive no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlcli.ops.packing import action_owner

__all__ = [
    "LOSS_AGGREGATIONS",
    "POLICY_LOSSES",
    "RATIO_LEVELS",
    "Actions",
    "BehaviourWeightLevel",
    "BehaviourWeightMode",
    "LossAggregationName",
    "LossesAndSums",
    "PolicyLossName",
    "behaviour_weights",
]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before `exp`, so that a single outlier token cannot make the
loss infinite."""

TAU_POS, TAU_NEG = 1.0, 1.05
"""How fast SAPO's gradients fade by default: faster for actions with negative advantages."""

PolicyLossName = Literal["ppo", "gspo", "cispo", "sequence", "sapo", "dppo_tv", "dppo_kl"]
LossAggregationName = Literal["token", "sequence", "constant"]
BehaviourWeightMode = Literal["mask", "truncate"]
BehaviourWeightLevel = Literal["token", "sequence", "geometric"]

LossesAndSums = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The loss of each of the M trained actions, and numbers, each summed over them."""


@dataclass(frozen=True)
class Actions:
    """The input of a policy loss: A = T - N actions of N whole sequences, packed;
    M of them are trained on."""

    logprobs: torch.Tensor
    """[A] log-probs of the policy that is trained, with their gradient."""
    old_logprobs: torch.Tensor
    """[A] log-probs of the policy that ratios are relative to."""
    advantages: torch.Tensor
    """[A]"""
    mask: torch.Tensor
    """[A] bool: the M actions that are trained on."""
    seqlens: Sequence[int]
    """N lengths in tokens."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """[M] log-probs minus the old ones."""
        return self.logprobs[self.mask] - self.old_logprobs[self.mask]


PolicyLoss = Callable[..., LossesAndSums]
"""(actions, settings by keyword) → the loss of each trained action, [M] with its gradient, and
stats, each summed over the M actions: `importance_ratio`, `approx_kl` (k1 from the old to the new
policy), and the tokens whose gradient a clip cut off."""


def clipped(
    actions: Actions,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    c_clip: float | None = None,
) -> LossesAndSums:
    """PPO's clipped loss (arXiv:1707.06347 eq. 7), with clip-higher (DAPO, arXiv:2503.14476 eq. 8)
    and dual clip (arXiv:1912.09729 eq. 5).

    ratio = exp(logprobs - old_logprobs)
    loss  = max(-A * ratio, -A * clip(ratio, 1 - eps_clip, 1 + eps_clip_high))
    loss  = min(loss, c_clip * |A|)        where A < 0, if c_clip is given
    """
    advantages = actions.advantages[actions.mask]
    log_ratio = _bounded(actions.log_ratio)
    ratio = log_ratio.exp()
    loss, beyond = _clipped_objective(ratio, advantages, eps_clip, eps_clip_high)
    dual = torch.zeros_like(loss, dtype=torch.bool)
    if c_clip is not None:
        bound = c_clip * advantages.abs()
        dual = (advantages < 0) & (bound < loss)
        loss = torch.where(dual, bound, loss)
    return loss, _stats(ratio, log_ratio, clip_fraction=beyond, dual_clip_fraction=dual)


def mean_clipped(
    actions: Actions, *, eps_clip: float, eps_clip_high: float | None = None
) -> LossesAndSums:
    """GSPO (arXiv:2507.18071 eq. 5 to 7): one ratio for all trained actions of a sequence, which
    are clipped as one.

        ratio = exp(mean over the sequence of (logprobs - old_logprobs))
        loss  = max(-A * ratio, -A * clip(ratio, 1 - eps_clip, 1 + eps_clip_high))

    With equal advantages in a sequence and the aggregation "sequence", this is the paper's
    objective, whose clips are 3e-4 and 4e-4.
    """
    log_ratio = sequence_mean_ratio(actions.log_ratio, actions.mask, actions.seqlens)
    return _clipped_as_one(actions, log_ratio, eps_clip, eps_clip_high)


def product_clipped(
    actions: Actions,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    loss_aggregation: LossAggregationName = "token",
) -> LossesAndSums:
    """A whole sequence as one action, whose ratio is the product of its tokens' ratios: RLOO as a
    bandit (arXiv:2402.14740, section 3), with PPO's clip.

        ratio = exp(sum over the sequence of (logprobs - old_logprobs))
        loss  = max(-A * ratio, -A * clip(ratio, 1 - eps_clip, 1 + eps_clip_high))

    Its loss is spread evenly over its actions, which therefore add up to that of the sequence: with
    the aggregation "constant" and a constant of 1, the loss is the mean over the responses. It is
    also with "sequence": as this takes the mean over the actions, each of them has the whole loss.
    """
    log_ratio = sequence_product_ratio(actions.log_ratio, actions.mask, actions.seqlens)
    loss, stats = _clipped_as_one(actions, log_ratio, eps_clip, eps_clip_high)
    if loss_aggregation == "sequence":
        return loss, stats
    owner, counts = _trained(actions.mask, actions.seqlens)
    return loss / counts.clamp(min=1)[owner], stats


def clipped_weights(
    actions: Actions, *, eps_clip: float, eps_clip_high: float | None = None
) -> LossesAndSums:
    """CISPO (arXiv:2506.13585 eq. 4 and 5): the clipped ratio only weights a token, which always
    keeps its gradient.

        weight = clip(ratio, 1 - eps_clip, 1 + eps_clip_high), without a gradient
        loss   = -weight * A * logprobs

    The paper sets no lower bound: `eps_clip` of 1 or more. `clip_fraction` counts the tokens whose
    weight was clipped.
    """
    log_ratio = _bounded(actions.log_ratio)
    ratio = log_ratio.exp()
    low, high = _bounds(eps_clip, eps_clip_high)
    weight = ratio.clamp(low, high).detach()
    loss = -weight * actions.advantages[actions.mask] * actions.logprobs[actions.mask]
    return loss, _stats(ratio, log_ratio, clip_fraction=weight != ratio)


def soft_gated(
    actions: Actions, *, tau_pos: float | None = None, tau_neg: float | None = None
) -> LossesAndSums:
    """SAPO (arXiv:2511.20347): instead of a clip, a sigmoid that flattens the objective the further
    a token's ratio is from 1.

        loss = -A * 4 / tau * σ(tau * (ratio - 1)), tau = tau_pos where A > 0, else tau_neg

    Its gradient is that of the ratio itself where this is 1, and fades on both sides. None:
    the values of the paper, 1 and 1.05.
    """
    advantages = actions.advantages[actions.mask]
    log_ratio = _bounded(actions.log_ratio)
    ratio = log_ratio.exp()
    positive = TAU_POS if tau_pos is None else tau_pos
    negative = TAU_NEG if tau_neg is None else tau_neg
    tau = torch.where(advantages > 0, positive, negative).to(ratio.dtype)
    loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return loss, _stats(ratio, log_ratio)


def within_total_variation(
    actions: Actions, *, eps_clip: float, eps_clip_high: float | None = None
) -> LossesAndSums:
    """DPPO with the binary approximation of the total variation (arXiv:2602.04879): a token is
    left out where the policy has moved by more than a bound in the direction of its advantage.

        divergence = |p - q|, p = exp(logprobs), q = exp(old_logprobs)
        loss       = -A * ratio, or 0 where the divergence is above eps_clip_high and p > q (A > 0),
                     or above eps_clip and p < q (A < 0)

    Unlike a clip of the ratio, it bounds likely tokens more tightly than unlikely ones.
    """
    new, old = actions.logprobs[actions.mask], actions.old_logprobs[actions.mask]
    divergence = (new.exp() - old.exp()).abs()
    return _unless_diverged(actions, divergence, eps_clip, eps_clip_high)


def within_binary_kl(
    actions: Actions, *, eps_clip: float, eps_clip_high: float | None = None
) -> LossesAndSums:
    """`within_total_variation` with the KL of the new from the old policy, of whether the token is
    chosen (the paper's binary KL).

    divergence = q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))
    """
    new, old = actions.logprobs[actions.mask], actions.old_logprobs[actions.mask]
    rest, old_rest = _of_others(new), _of_others(old)
    divergence = old.exp() * (old - new) + old_rest * (old_rest.log() - rest.log())
    return _unless_diverged(actions, divergence, eps_clip, eps_clip_high)


def _of_others(logprobs: torch.Tensor) -> torch.Tensor:
    """The probability of all other tokens, which is never 0."""
    return (-torch.expm1(logprobs)).clamp(min=torch.finfo(logprobs.dtype).tiny)


def _unless_diverged(
    actions: Actions, divergence: torch.Tensor, low: float, high: float | None
) -> LossesAndSums:
    """The unclipped loss of the actions whose divergence [M] is within the bounds, or which lead
    back; 0 for the others."""
    advantages = actions.advantages[actions.mask]
    log_ratio = _bounded(actions.log_ratio)
    ratio = log_ratio.exp()
    too_likely = (divergence > (low if high is None else high)) & (log_ratio > 0)
    too_unlikely = (divergence > low) & (log_ratio < 0)
    beyond = torch.where(advantages > 0, too_likely, too_unlikely)
    loss = torch.where(beyond, 0.0, -advantages * ratio)
    return loss, _stats(ratio, log_ratio, clip_fraction=beyond)


def _clipped_as_one(
    actions: Actions, log_ratio: torch.Tensor, eps_clip: float, eps_clip_high: float | None
) -> LossesAndSums:
    """PPO's clipped loss of actions that share the log-ratios [M] of their sequences."""
    ratio = _bounded(log_ratio).exp()
    loss, beyond = _clipped_objective(
        ratio, actions.advantages[actions.mask], eps_clip, eps_clip_high
    )
    return loss, _stats(ratio, actions.log_ratio, clip_fraction=beyond)


def _clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, eps_clip: float, eps_clip_high: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each action, whether the clip cut its gradient off)."""
    low, high = _bounds(eps_clip, eps_clip_high)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(low, high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def _bounds(eps_clip: float, eps_clip_high: float | None) -> tuple[float, float]:
    return 1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high)


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def _stats(
    ratio: torch.Tensor, log_ratio: torch.Tensor, **shares: torch.Tensor
) -> dict[str, torch.Tensor]:
    counts = {name: flags.sum().float() for name, flags in shares.items()}
    return {"importance_ratio": ratio.sum(), "approx_kl": -log_ratio.sum(), **counts}


POLICY_LOSSES: Mapping[PolicyLossName, PolicyLoss] = {
    "ppo": clipped,
    "gspo": mean_clipped,
    "cispo": clipped_weights,
    "sequence": product_clipped,
    "sapo": soft_gated,
    "dppo_tv": within_total_variation,
    "dppo_kl": within_binary_kl,
}


RatioLevel = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]
"""(log-ratios of the trained actions [M], mask [A], N lengths in tokens) → the log-ratio that each
of these actions counts with, [M]."""


def token_ratio(
    log_ratio: torch.Tensor, mask: torch.Tensor, seqlens: Sequence[int]
) -> torch.Tensor:
    """Each action's own."""
    return log_ratio


def sequence_product_ratio(
    log_ratio: torch.Tensor, mask: torch.Tensor, seqlens: Sequence[int]
) -> torch.Tensor:
    """The product of the ratios of a sequence."""
    owner, counts = _trained(mask, seqlens)
    zeros = torch.zeros(len(counts), dtype=log_ratio.dtype, device=log_ratio.device)
    return zeros.index_add(0, owner, log_ratio)[owner]


def sequence_mean_ratio(
    log_ratio: torch.Tensor, mask: torch.Tensor, seqlens: Sequence[int]
) -> torch.Tensor:
    """The geometric mean of the ratios of a sequence."""
    owner, counts = _trained(mask, seqlens)
    return sequence_product_ratio(log_ratio, mask, seqlens) / counts[owner]


RATIO_LEVELS: Mapping[BehaviourWeightLevel, RatioLevel] = {
    "token": token_ratio,
    "sequence": sequence_product_ratio,
    "geometric": sequence_mean_ratio,
}


LossAggregation = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(mask [A], N lengths in tokens, settings by keyword) → the weight of each trained action in the
loss, [M], and the total weight, by which the sum over all micro-batches and ranks is divided."""


def token_mean(mask: torch.Tensor, seqlens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token has the same weight, so long responses have more."""
    return mask[mask].to(torch.float32), mask.count_nonzero()


def sequence_mean(mask: torch.Tensor, seqlens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every response counts equally, as the mean of its tokens (GRPO as published). One without
    tokens to train on does not count."""
    owner, counts = _trained(mask, seqlens)
    return counts.clamp(min=1).to(torch.float32).reciprocal()[owner], counts.count_nonzero()


def constant_mean(
    mask: torch.Tensor, seqlens: Sequence[int], *, loss_constant: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token counts equally, and every response as `loss_constant` tokens (Dr.GRPO,
    arXiv:2503.20783): neither their lengths nor how many of them are masked affects the weight of a
    token."""
    shares = torch.full_like(mask[mask], 1 / loss_constant, dtype=torch.float32)
    return shares, torch.tensor(len(seqlens), device=mask.device)


LOSS_AGGREGATIONS: Mapping[LossAggregationName, LossAggregation] = {
    "token": token_mean,
    "sequence": sequence_mean,
    "constant": constant_mean,
}


def _trained(mask: torch.Tensor, seqlens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each trained action, [M], and how many of these each sequence has, [N]."""
    owner = action_owner(seqlens, mask.device)[mask]
    return owner, torch.bincount(owner, minlength=len(seqlens))


def behaviour_weights(
    proximal_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    mask: torch.Tensor,
    seqlens: Sequence[int],
    *,
    floor: float | None = None,
    cap: float | None = None,
    mode: BehaviourWeightMode = "mask",
    level: BehaviourWeightLevel = "token",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the decoupled PPO loss (arXiv:2110.00641): exp(proximal - behaviour), of each
    action, or one for all that are trained on in a sequence; all tensors [A], of N sequences.

    Returns (weights, kept mask). Weights outside the bounds are treated by `mode`: with "mask",
    their tokens leave the mask, and so both the sum and the count that it is divided by, so that
    dropping them does not shrink the update of the others. With "truncate", they become the bound
    itself. Weights outside the mask are 0.

    "truncate" with a cap is truncated importance sampling (TIS), "mask" with both bounds IcePop
    (arXiv:2510.18855), and "mask" with a level of sequences masked importance sampling (MIS).
    """
    log_ratio = proximal_logprobs[mask] - behaviour_logprobs[mask]
    bounded = _bounded(RATIO_LEVELS[level](log_ratio, mask, seqlens)).exp().detach()
    low, high = floor or 0.0, math.inf if cap is None else cap
    remaining = mask.clone()
    if mode == "mask":
        remaining[mask] = (bounded >= low) & (bounded <= high)
    weights = torch.zeros_like(proximal_logprobs)
    weights[mask] = bounded.clamp(low, high)
    return torch.where(remaining, weights, 0.0), remaining
