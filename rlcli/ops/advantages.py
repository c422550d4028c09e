"""Advantage estimators: how much better each action of a finished response was than expected.

`generalized` needs a critic, `relative` compares responses with each other. The latter combines a
baseline, a scale and a credit, each chosen by name: a new baseline is a function here, and its name
in `BASELINES` and `BaselineName`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlcli.ops.gae import TurnSteps, discounted_sums, gae
from rlcli.ops.normalization import group_moments
from rlcli.ops.packing import action_owner, summed
from rlcli.ops.reduce import AllReduce, identity, masked_moments

__all__ = [
    "BASELINES", "SCALES", "BaselineName", "CreditName", "Outcomes", "ScaleName", "Trajectories",
    "generalized", "relative", "standardized",
]  # fmt: skip

SCALE_EPS = 1e-6
"""Added to a standard deviation that advantages are divided by, as verl does; TRL adds 1e-4."""
ROUNDING = 2.0**-23
"""Rewards are float32: outcomes that differ by less than this share of the rewards that they add up
are equal."""

BaselineName = Literal["group", "leave_one_out", "batch", "none"]
ScaleName = Literal["group", "batch", "mean", "none"]
CreditName = Literal["response", "to_go"]


@dataclass(frozen=True)
class Trajectories:
    """Finished responses: T tokens of N packed sequences,
    with A = T - N actions (action t chose token t + 1)."""

    rewards: torch.Tensor
    """[A] reward of each action, including a KL penalty if it is part of the reward;
    0 outside of responses."""
    values: torch.Tensor
    """[T] value of the state after each token; zeros if there is no critic."""
    mask: torch.Tensor
    """[A] bool: the actions that chose a token of a response."""
    seqlens: Sequence[int]
    """N lengths in tokens."""
    group: torch.Tensor
    """[N] int64, from 0: the prompt that each sequence answers. Groups never span ranks."""
    bootstrap: torch.Tensor
    """[N] bool: whether the value of the last state stands for what would have followed."""
    skipped: torch.Tensor | None = None
    """[A] bool: the actions that are no steps, as they chose nothing that is new; None: there are
    none."""


def generalized(
    trajectories: Trajectories,
    *,
    discount: float,
    gae_lambda: float,
    turn_discount: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (`rlcli.ops.gae`): (advantages, returns), both [A] float32.
    It needs a critic, unless `gae_lambda` is 1. `turn_discount`: the discount factor from a turn of
    an episode to the next; None: what was observed is discounted token by token."""
    t = trajectories
    turns = None if turn_discount is None else TurnSteps(t.mask, turn_discount)
    return gae(t.rewards, t.values, t.seqlens, t.bootstrap, discount, gae_lambda, turns, t.skipped)


def relative(
    trajectories: Trajectories,
    all_reduce: AllReduce = identity,
    *,
    baseline: BaselineName = "group",
    scale: ScaleName = "group",
    credit: CreditName = "response",
    turn_discount: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each response earned compared with the others: (advantages, credits),
    both [A] float32; no critic.

        outcome_i    = sum of the rewards of response i
        credit_{i,t} = outcome_i ("response"), or the sum of its rewards from action t on ("to_go"),
                       those of a turn that is k turns later weighted by turn_discount ** k
        advantage    = (credit_{i,t} - baseline_i) / scale_i

    With "to_go", what is compared are turns: in a group with the same turn of other responses, in a
    batch with all turns. The outcome of a turn is the mean credit of its actions, and standard
    deviations are those of credits, so that neither what was earned before nor a discount counts as
    an advantage. Turns, like responses, count equally.

    GRPO (arXiv:2402.03300, section 4.1.2) is group over group, Dr.GRPO (arXiv:2503.20783, eq. 3)
    group over none, RLOO (arXiv:2402.14740, eq. 8) leave_one_out over none. REINFORCE++
    (arXiv:2501.03262) credits "to_go" without a baseline, and normalises the advantages of all
    tokens afterwards. MaxRL (arXiv:2602.02710) is group over mean. Standard deviations are
    unbiased; outcomes without a spread, such as those of a group of one response, carry no
    information: divided by it, advantages are 0. A sequence without an action is ignored.
    """
    t = trajectories
    owner = action_owner(t.seqlens, t.mask.device)
    earned = torch.where(t.mask, t.rewards, 0.0).to(torch.float64)
    outcomes = _of_responses(t, earned, owner, all_reduce)
    credits = outcomes.total[owner]
    if credit == "to_go":
        turns = TurnSteps(t.mask, turn_discount)
        credits = _to_go(earned, owner, turns)
        gross = _to_go(earned.abs(), owner, turns)
        outcomes, owner = _of_turns(t, turns, credits, gross, all_reduce)
    advantages = (credits - BASELINES[baseline](outcomes)[owner]) / SCALES[scale](outcomes)[owner]
    pair = torch.where(t.mask, torch.stack([advantages, credits]), 0.0).to(torch.float32)
    return pair[0], pair[1]


def _to_go(earned: torch.Tensor, owner: torch.Tensor, turns: TurnSteps) -> torch.Tensor:
    """[A] float64: the rewards of a response from each action on."""
    begins = turns.begins(owner).roll(-1)
    return discounted_sums(earned, owner, torch.where(begins, turns.discount, 1.0).to(earned))


@dataclass(frozen=True)
class Outcomes:
    """What N responses, or turns, have earned."""

    total: torch.Tensor
    """[N] float64: the mean of the credits of each; of a response as a whole, its rewards."""
    gross: torch.Tensor
    """[N] float64: the same of the sizes of rewards."""
    group: torch.Tensor
    """[N] int64: the prompt of each response; equal for those that are compared."""
    acted: torch.Tensor
    """[N] bool: whether each counts."""
    all_reduce: AllReduce
    """The sum over the ranks that share the batch."""
    within: torch.Tensor
    """[N] float64: the biased variance of the credits of each."""


def _of_responses(
    t: Trajectories, earned: torch.Tensor, owner: torch.Tensor, all_reduce: AllReduce
) -> Outcomes:
    """All rewards of each response; `earned`, `owner`: [A], the reward and response of each
    action."""
    total, gross, actions = (
        summed(numbers, owner, len(t.seqlens)) for numbers in (earned, earned.abs(), t.mask)
    )
    return Outcomes(total, gross, t.group, actions > 0, all_reduce, torch.zeros_like(total))


def _of_turns(
    t: Trajectories,
    turns: TurnSteps,
    credits: torch.Tensor,
    gross: torch.Tensor,
    all_reduce: AllReduce,
) -> tuple[Outcomes, torch.Tensor]:
    """(the turns of all responses, grouped by prompt and by their number in the response; the turn
    of each action, [A] int64). `credits` and `gross` are [A] float64."""
    turn, group = _numbered(t, turns)
    size = summed(t.mask, turn, len(group))

    def mean(numbers: torch.Tensor) -> torch.Tensor:
        return summed(torch.where(t.mask, numbers, 0.0), turn, len(group)) / size.clamp(min=1)

    total = mean(credits)
    within = mean((credits - total[turn]).square())
    return Outcomes(total, mean(gross), group, size > 0, all_reduce, within), turn


def _numbered(t: Trajectories, turns: TurnSteps) -> tuple[torch.Tensor, torch.Tensor]:
    """(the turn of each action, [A] int64; of each turn a number that those with its prompt and
    place in their responses share, int64)."""
    owner, n_seqs = action_owner(t.seqlens, t.mask.device), len(t.seqlens)
    begins = turns.begins(owner)
    sizes = 1 + summed(begins, owner, n_seqs).long()
    response = torch.repeat_interleave(torch.arange(n_seqs, device=owner.device), sizes)
    firsts = (sizes.cumsum(0) - sizes)[response]
    ordinal = torch.arange(len(response), device=owner.device) - firsts
    return owner + begins.cumsum(0), t.group[response] + n_seqs * ordinal


def group_mean(outcomes: Outcomes) -> torch.Tensor:
    """[N] the mean of the responses to the same prompt."""
    _, mean, _ = group_moments(outcomes.total, outcomes.group, outcomes.acted)
    return mean[outcomes.group]


def leave_one_out_mean(outcomes: Outcomes) -> torch.Tensor:
    """[N] the mean of the *other* responses to the same prompt; for a single response,
    its own outcome."""
    count, mean, _ = group_moments(outcomes.total, outcomes.group, outcomes.acted)
    n, mean = count[outcomes.group], mean[outcomes.group]
    others = (n * mean - outcomes.total) / (n - 1).clamp(min=1)
    return torch.where(n > 1, others, outcomes.total)


def batch_mean(outcomes: Outcomes) -> torch.Tensor:
    """[N] the mean of all responses, on all ranks."""
    _, mean, _ = masked_moments(outcomes.total, outcomes.acted, outcomes.all_reduce)
    return torch.full_like(outcomes.total, mean)


def no_baseline(outcomes: Outcomes) -> torch.Tensor:
    return torch.zeros_like(outcomes.total)


def group_std(outcomes: Outcomes) -> torch.Tensor:
    """[N] the standard deviation of the responses to the same prompt;
    infinite where they earned the same."""
    count, _, variance = group_moments(outcomes.total, outcomes.group, outcomes.acted)
    _, gross, _ = group_moments(outcomes.gross, outcomes.group, outcomes.acted)
    _, within, _ = group_moments(outcomes.within, outcomes.group, outcomes.acted)
    unbiased = (variance * count / (count - 1).clamp(min=1)).sqrt()
    std = torch.where(unbiased > ROUNDING * gross, unbiased + SCALE_EPS, math.inf)[outcomes.group]
    return std.hypot(within.sqrt()[outcomes.group])


def batch_std(outcomes: Outcomes) -> torch.Tensor:
    """[N] the standard deviation of all responses, on all ranks;
    infinite if they earned the same."""
    count, _, variance = masked_moments(outcomes.total, outcomes.acted, outcomes.all_reduce)
    _, gross, _ = masked_moments(outcomes.gross, outcomes.acted, outcomes.all_reduce)
    _, within, _ = masked_moments(outcomes.within, outcomes.acted, outcomes.all_reduce)
    unbiased = (variance * count / max(count - 1, 1.0)) ** 0.5
    std = unbiased + SCALE_EPS if unbiased > ROUNDING * gross else math.inf
    return torch.full_like(outcomes.total, math.hypot(std, within**0.5))


def group_mean_scale(outcomes: Outcomes) -> torch.Tensor:
    """[N] the mean of the responses to the same prompt: with rewards of 0 and 1, the share of right
    ones, so that rare successes have more weight. Infinite where they earned the same,
    or no more than 0 on average."""
    mean = group_mean(outcomes)
    has_signal = group_std(outcomes).isfinite() & (mean > 0)
    return torch.where(has_signal, mean + SCALE_EPS, math.inf)


def no_scale(outcomes: Outcomes) -> torch.Tensor:
    return torch.ones_like(outcomes.total)


OfOutcomes = Callable[[Outcomes], torch.Tensor]

BASELINES: Mapping[BaselineName, OfOutcomes] = {
    "group": group_mean,
    "leave_one_out": leave_one_out_mean,
    "batch": batch_mean,
    "none": no_baseline,
}
SCALES: Mapping[ScaleName, OfOutcomes] = {
    "group": group_std,
    "batch": batch_std,
    "mean": group_mean_scale,
    "none": no_scale,
}


def standardized(numbers: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """[N] float64: how many standard deviations each response is above the mean of those to its
    prompt; 0 where they are equal. numbers, group (int64, from 0) are [N]."""
    total = numbers.to(torch.float64)
    everything = torch.ones_like(group, dtype=torch.bool)
    nothing = torch.zeros_like(total)
    outcomes = Outcomes(total, total.abs(), group, everything, identity, nothing)
    return (total - group_mean(outcomes)) / group_std(outcomes)
