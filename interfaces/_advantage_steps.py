"""The steps of a call for advantages, from finished responses to a reward for each action: which
responses count, which log-probs stand for which policy, and what each response and action earns.

All of them are pure; `settings` are the interface's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import (
    DENSE_REWARDS,
    FORKS,
    NOT_ENDED,
    PROMPT_MASK,
    REFERENCE,
    REWARDS,
    SAMPLED_LOGPROBS,
    SEQUENCES,
)
from rlcli.ops.kl import kl_estimate
from rlcli.ops.packing import action_mask, action_owner, drop_first, summed
from rlcli.ops.policy_losses import behaviour_weights
from rlcli.ops.reduce import AllReduce
from rlcli.ops.rewards import dense_rewards, overlong_penalties, shape_scores, token_rewards

from ._policy_distances import RECOMPUTED, sum_of_kl
from ._sequences import best_of_each, group_of_each

if TYPE_CHECKING:
    from ._advantages import AdvantageInterface


@dataclass(frozen=True)
class Responses:
    """The N sequences of a batch, and which of their A = T - N actions belong to responses that
    count."""

    data: SequenceSample
    lengths: list[int]
    """N lengths in tokens."""
    owner: torch.Tensor
    """[A] int64: the sequence of each action."""
    chosen: torch.Tensor
    """[N] bool: the responses that are trained on."""
    actions: torch.Tensor
    """[A] bool: the actions that chose a token of one of these."""

    @property
    def group(self) -> torch.Tensor:
        """[N] int64: the sample of each response."""
        return group_of_each(self.data).to(self.owner.device)

    @property
    def sizes(self) -> torch.Tensor:
        """[N] int64: the number of actions of each response."""
        return torch.bincount(self.owner[self.actions], minlength=len(self.lengths))

    @property
    def extents(self) -> torch.Tensor:
        """[N] int64: the number of tokens from the first action of each response on. Of an episode
        that includes what it observed, as `max_new_tokens` does."""
        firsts = torch.full_like(self.group, len(self.owner))
        places = self.actions.nonzero().squeeze(1)
        firsts.scatter_reduce_(0, self.owner[places], places, "amin")
        ends = torch.bincount(self.owner, minlength=len(firsts)).cumsum(0)
        return (ends - firsts).clamp(min=0)

    @property
    def rereading(self) -> torch.Tensor | None:
        """[A] bool: the actions that chose a token of what a policy read again because a template
        had rewritten it: from where a row begins to its first sampled token. None without
        `forks`."""
        if FORKS not in self.data.keys:
            return None
        forks, sampled = self.data.data[FORKS], ~self.data.data[PROMPT_MASK]
        places = torch.arange(1, len(forks) + 1, device=forks.device)
        begun, spoken = ((places * flags).cummax(0).values for flags in (forks, sampled))
        return drop_first(begun > spoken, self.lengths)

    @property
    def were_cut_off(self) -> torch.Tensor:
        """[N] bool."""
        cut_off: torch.Tensor = self.data.data[NOT_ENDED]
        return cut_off

    def means(
        self, numbers: torch.Tensor, counted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of the numbers [A] over the counted actions of each response, [N], and whether
        it has any, [N] bool."""
        owner = self.owner[counted]
        sizes = torch.bincount(owner, minlength=len(self.lengths))
        return summed(numbers[counted], owner, len(sizes)) / sizes.clamp(min=1), sizes > 0

    def sums_by_sample(
        self, numbers: torch.Tensor, counted: torch.Tensor
    ) -> list[tuple[float, int]]:
        """For each sample the sum of the numbers [N] of its sequences that count,
        and how many these are."""
        group = self.group[counted]
        sums = summed(numbers[counted], group, self.data.bs)
        counts = torch.bincount(group, minlength=self.data.bs)
        return list(zip(sums.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class OldPolicy:
    """What the log-probs of the responses say about the policies behind them; all [A]."""

    sampler: torch.Tensor
    """Log-probs of the policy that sampled, which pays the KL penalty."""
    old: torch.Tensor
    """Log-probs that the ratio of the loss is taken to."""
    weights: torch.Tensor
    """Weight of each action in the decoupled loss, else 1."""
    trained: torch.Tensor
    """bool: the actions that are trained on."""


def responses_of(settings: AdvantageInterface, data: SequenceSample) -> Responses:
    """The responses of a batch; with `train_on_best`, the best to each prompt count."""
    lengths, prompt_mask = data.flat_seqlens(SEQUENCES), data.data[PROMPT_MASK]
    owner = action_owner(lengths, prompt_mask.device)
    chosen = torch.ones(len(lengths), dtype=torch.bool, device=prompt_mask.device)
    if settings.train_on_best is not None:
        chosen = best_of_each(data, settings.train_on_best).to(prompt_mask.device)
    actions = action_mask(prompt_mask, lengths) & chosen[owner]
    return Responses(data, lengths, owner, chosen, actions)


def old_policy(settings: AdvantageInterface, responses: Responses) -> OldPolicy:
    """Which log-probs stand for which policy.

    The KL penalty is that of the sampling policy, because the estimators of `rlcli.ops.kl` are
    expectations over its samples: with another policy's log-probs they do not estimate a KL at all.
    `recompute_logprob` uses the trainer's numbers for that policy, everywhere; `use_decoupled_loss`
    keeps the sampler's, and uses the proximal policy only in the loss. AReaL does the same.
    """
    behaviour, trained = responses.data.data[SAMPLED_LOGPROBS], responses.actions
    ones = torch.ones_like(behaviour)
    if settings.mask_too_long:
        trained = trained & ~responses.were_cut_off[responses.owner]
    if not settings.is_recomputed:
        return OldPolicy(behaviour, behaviour, ones, trained)
    proximal = responses.data.data[RECOMPUTED]
    if not settings.use_decoupled_loss:
        return OldPolicy(proximal, proximal, ones, trained)
    weights, remaining = behaviour_weights(
        proximal,
        behaviour,
        trained,
        responses.lengths,
        floor=settings.behav_imp_weight_floor,
        cap=settings.behav_imp_weight_cap,
        mode=settings.behav_imp_weight_mode,
        level=settings.behav_imp_weight_level,
    )
    return OldPolicy(behaviour, proximal, weights, remaining)


def shaped_scores(settings: AdvantageInterface, responses: Responses) -> torch.Tensor:
    """[N] the shaped score of each response; 0 with dense rewards,
    but for the penalty on long ones."""
    no_eos = responses.were_cut_off
    if settings.use_dense_reward:
        scores = torch.zeros(len(no_eos), device=no_eos.device)
    else:
        scores = shape_scores(
            responses.data.data[REWARDS],
            no_eos,
            scaling=settings.reward_output_scaling,
            bias=settings.reward_output_bias,
            clip=settings.max_reward_clip,
            mask_no_eos_with_zero=settings.mask_no_eos_with_zero,
        )
    if settings.overlong_buffer is None:
        return scores
    assert settings.overlong_limit is not None  # NEEDS
    limit, buffer = settings.overlong_limit, settings.overlong_buffer
    beyond = overlong_penalties(responses.extents, limit, buffer)
    return scores + settings.overlong_penalty * beyond.to(scores)


def rewards_of_actions(
    settings: AdvantageInterface, responses: Responses, policy: OldPolicy, scores: torch.Tensor
) -> torch.Tensor:
    """[A] float32: the score at the end of each response, the KL penalty if it is part of the
    reward, and dense rewards."""
    data, lengths, dense = responses.data, responses.lengths, _dense(settings, responses)
    kl = torch.zeros_like(policy.sampler)
    if settings.kl_ctl and settings.kl_in == "reward":
        kl = kl_estimate(policy.sampler, data.data[REFERENCE], settings.kl_estimator)
    coef = settings.controller.coef
    return token_rewards(scores, kl, responses.actions, lengths, coef, dense)


def earned(
    settings: AdvantageInterface, responses: Responses, scores: torch.Tensor
) -> torch.Tensor:
    """[N] float32: the score of each response, and its dense rewards; without a KL penalty."""
    dense, actions = _dense(settings, responses), responses.actions
    if dense is None:
        return scores
    return scores + summed(dense[actions], responses.owner[actions], len(scores)).to(scores)


def _dense(settings: AdvantageInterface, responses: Responses) -> torch.Tensor | None:
    """[A] the dense reward of each action, if they are used."""
    if not settings.use_dense_reward:
        return None
    scaling, clip = settings.reward_output_scaling, settings.max_reward_clip
    states = responses.data.data[DENSE_REWARDS]
    return dense_rewards(states, responses.lengths, settings.reward_delta, scaling, clip)


def kl_per_response(
    settings: AdvantageInterface, responses: Responses, all_reduce: AllReduce
) -> tuple[float, int]:
    """KL of the trained policy, in nats, summed over a response, in the mean over the responses of
    all ranks, and their number. Where nobody has computed its log-probs, the sampler's stand for
    them."""
    policy = responses.data.data[RECOMPUTED if settings.is_recomputed else SAMPLED_LOGPROBS]
    kl = sum_of_kl(policy, responses.data, responses.actions)
    total, count = all_reduce(torch.stack([kl, responses.chosen.sum().double()])).tolist()
    return total / max(count, 1.0), int(count)
