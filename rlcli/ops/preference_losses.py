"""Losses that compare two sequences, by name, and the weight of each pair; the loss of an answer
that is judged alone.

A new loss of pairs is a function here, and its name in `PREFERENCE_LOSSES` and
`PreferenceLossName`; its keyword-only parameters are its settings. Sequences are ordered as chosen
0, rejected 0, chosen 1, rejected 1, …: 2 P of them make P pairs.

Tokens outside a mask are never read: their entries may be NaN or Inf, and they receive no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from rlcli.ops.packing import action_owner

__all__ = [
    "PAIR_AGGREGATIONS",
    "PREFERENCE_LOSSES",
    "PairAggregationName",
    "PreferenceLossName",
    "bradley_terry",
    "chosen_and_rejected",
    "prospect_loss",
    "sequence_sums",
]

PreferenceLossName = Literal["sigmoid", "ipo", "hinge", "robust"]
PairAggregationName = Literal["pair", "prompt"]

PreferenceLoss = Callable[..., torch.Tensor]
"""(lead [P], settings by keyword) → the loss of each pair, [P]. The lead is that of the chosen
sequence over the rejected one: the difference of their log-probs,
each minus the reference's if there is one."""


def sigmoid(
    lead: torch.Tensor, *, beta: float, label_smoothing: float = 0.0, gamma: float = 0.0
) -> torch.Tensor:
    """DPO (arXiv:2305.18290 eq. 7): -log σ(z), z = beta * lead - gamma.

    `gamma` is SimPO's target margin (arXiv:2405.14734 eq. 6). With `label_smoothing` ε, the share
    of pairs that are labelled the wrong way round, it is cDPO: -(1 - ε) log σ(z) - ε log σ(-z).
    """
    z = beta * lead - gamma
    loss = -F.logsigmoid(z)
    if not label_smoothing:
        return loss
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-z)


def robust(lead: torch.Tensor, *, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Robust DPO (arXiv:2403.00409 eq. 12): DPO's loss without the bias from a share ε of flipped
    labels.

    (-(1 - ε) log σ(z) + ε log σ(-z)) / (1 - 2 ε), z = beta * lead
    """
    z = beta * lead
    right, wrong = F.logsigmoid(z), F.logsigmoid(-z)
    return (label_smoothing * wrong - (1 - label_smoothing) * right) / (1 - 2 * label_smoothing)


def ipo(lead: torch.Tensor, *, beta: float) -> torch.Tensor:
    """IPO (arXiv:2310.12036 eq. 17, with tau = beta): (lead - 1 / (2 beta))²."""
    return (lead - 1 / (2 * beta)).square()


def hinge(lead: torch.Tensor, *, beta: float) -> torch.Tensor:
    """SLiC's hinge (arXiv:2305.10425) on DPO's rewards: max(0, 1 - beta * lead)."""
    return (1 - beta * lead).relu()


PREFERENCE_LOSSES: Mapping[PreferenceLossName, PreferenceLoss] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
}


def bradley_terry(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margins: torch.Tensor | None = None,
    centering: float = 0.0,
) -> torch.Tensor:
    """Loss of a reward model on pairs of scores; all tensors [P].

        -log σ(chosen - rejected - margin) + centering * (chosen + rejected)²

    The first term is the likelihood of the Bradley-Terry model, with a margin as in
    arXiv:2307.09288 eq. 2. It does not determine the scores' offset: the second pulls their mean to
    0 (arXiv:2312.09244, section 2).
    """
    lead = chosen - rejected
    loss = -F.logsigmoid(lead if margins is None else lead - margins)
    return loss + centering * (chosen + rejected).square() if centering else loss


def prospect_loss(
    log_ratios: torch.Tensor, desirable: torch.Tensor, reference_point: float, *, beta: float
) -> torch.Tensor:
    """KTO (arXiv:2402.01306 eq. 7), without the weights of its two kinds of answers; [N].

        1 - σ(beta * (log_ratio - z))    of a desirable answer
        1 - σ(beta * (z - log_ratio))    of an undesirable one

    `log_ratios` [N]: log-probs of answers, each minus the reference's. The reference point z is an
    estimate of the policy's KL from the reference; with z = 0 it is APO-zero for answers without a
    counterpart (arXiv:2408.06266 eq. 7).
    """
    gains = beta * (log_ratios - reference_point)
    return torch.where(desirable, -gains, gains).sigmoid()


def chosen_and_rejected(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[2 P, …] → the rows of the chosen sequences, [P, …], and those of the rejected ones."""
    return rows[0::2], rows[1::2]


def sequence_sums(
    actions: torch.Tensor, mask: torch.Tensor, seqlens: Sequence[int]
) -> torch.Tensor:
    """[T - N] numbers of actions → [N]: for each of N sequences,
    the sum of those that `mask` keeps."""
    counted = actions[mask]
    owner = action_owner(seqlens, mask.device)[mask]
    return torch.zeros(len(seqlens), dtype=counted.dtype, device=counted.device).index_add(
        0, owner, counted
    )


PairAggregation = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""(pairs of each prompt, which of the P pairs count, [P] bool) → the weight of each pair in the
loss, [P]. Their sum is the total weight, by which the sum over all micro-batches and ranks is
divided."""


def every_pair(pairs: Sequence[int], counted: torch.Tensor) -> torch.Tensor:
    """Every pair has the same weight, so prompts with many pairs have more."""
    return counted.to(torch.float32)


def every_prompt(pairs: Sequence[int], counted: torch.Tensor) -> torch.Tensor:
    """Every prompt counts equally, as the mean of its pairs (arXiv:2203.02155 eq. 1)."""
    prompt = torch.repeat_interleave(
        torch.arange(len(pairs)), torch.tensor(list(pairs), dtype=torch.int64)
    )
    owner = prompt.to(counted.device)
    pairs_of_prompt = torch.zeros(len(pairs), device=counted.device).index_add(
        0, owner, counted.to(torch.float32)
    )
    return counted / pairs_of_prompt.clamp(min=1)[owner]


PAIR_AGGREGATIONS: Mapping[PairAggregationName, PairAggregation] = {
    "pair": every_pair,
    "prompt": every_prompt,
}
