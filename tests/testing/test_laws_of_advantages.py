"""Estimators with one mistake each, which the laws of advantages report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from rlcli.api.model import ModelInterfaceAbstraction, make_interface
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.contract import Violation
from rlcli.testing.interface.advantages import AdvantageChecks
from rlcli.testing.interface.described_arguments import DescribedArgumentChecks
from rlcli.testing.interface.inference_trial import CallTrial, inference_batches_for
from rlcli.testing.interface.training_trial import usual_batches


@dataclass(kw_only=True)
class Relative(GroupRelativeInterface):
    """Changes advantages after they are made; each class below has one mistake."""

    def inference(self, model, data, mb_spec):
        output = super().inference(model, data, mb_spec)
        output.data["advantages"] = self.changed(output.data["advantages"], output, data)
        return output

    def changed(self, advantages, output, data):
        return advantages

    def ends(self, output):
        return torch.tensor(output.flat_seqlens("advantages")).cumsum(0) - 1


@dataclass(kw_only=True)
class PaysNotTheLastAction(Relative):
    def changed(self, advantages, output, data):
        advantages[self.ends(output)] = 0.0
        return advantages


@dataclass(kw_only=True)
class PaysWhatWasCutOff(Relative):
    def changed(self, advantages, output, data):
        counts = torch.tensor(output.flat_seqlens("advantages"))
        return advantages * torch.repeat_interleave(data.data["seq_no_eos_mask"], counts)


@dataclass(kw_only=True)
class AddsTheFirstReward(Relative):
    def changed(self, advantages, output, data):
        sizes = [len(group) for group in data.seqlens["rewards"]]
        firsts = [rewards[0].repeat(len(rewards)) for rewards in data.data["rewards"].split(sizes)]
        counts = torch.tensor(output.flat_seqlens("advantages"))
        return advantages + 0.01 * torch.repeat_interleave(torch.cat(firsts), counts)


@dataclass(kw_only=True)
class PaysThePenaltyTwice(Relative):
    def changed(self, advantages, output, data):
        return advantages + 0.1 * data.data["packed_ref_logprobs"] * output.data["loss_mask"]


@dataclass(kw_only=True)
class ContinuesAfterTheEnd(GAEInterface):
    def _trajectories(self, *parts):
        trajectories = super()._trajectories(*parts)
        return replace(trajectories, bootstrap=torch.ones_like(trajectories.bootstrap))


@dataclass(kw_only=True)
class NormalisesReturns(GAEInterface):
    def estimate(self, trajectories, all_reduce):
        advantages, returns = super().estimate(trajectories, all_reduce)
        return advantages, returns / returns.std()


@dataclass(kw_only=True)
class PaysTheLastActionAlone(GAEInterface):
    def estimate(self, trajectories, all_reduce):
        advantages, returns = super().estimate(trajectories, all_reduce)
        counts = torch.tensor(trajectories.seqlens) - 1
        is_last = torch.zeros(len(advantages), dtype=torch.bool)
        is_last[counts.cumsum(0) - 1] = True
        return torch.where(is_last, advantages, 0.0), returns


MISTAKES = [
    (PaysTheLastActionAlone, "a_reward_reaches_its_last_action", "raise the first advantage"),
    (PaysNotTheLastAction, "a_reward_reaches_its_last_action", "raise the last advantage"),
    (PaysWhatWasCutOff, "a_reward_reaches_its_last_action", "of responses that ended by 0"),
    (AddsTheFirstReward, "the_order_within_a_group", "are in reverse order"),
    (PaysThePenaltyTwice, "a_penalty_is_paid_once", "leave the penalty to the loss"),
    (ContinuesAfterTheEnd, "nothing_comes_after_an_end", "after the end of responses"),
    (NormalisesReturns, "returns_are_in_the_units", "half as large are off by"),
]


def rating(cls):
    return CallTrial(
        cls, "inference", make_batch(cls().reads("inference").needed), DigitTokenizer()
    )


@pytest.mark.parametrize(("cls", "start", "finding"), MISTAKES)
def test_a_mistake_in_advantages_is_found(cls, start, finding):
    (name,) = [name for name in dir(AdvantageChecks) if name.startswith(f"test_{start}")]
    check = getattr(AdvantageChecks(), name)
    check(rating(GAEInterface if issubclass(cls, GAEInterface) else Relative))
    with pytest.raises(Violation, match=finding):
        check(rating(cls))


@dataclass(kw_only=True)
class ReadsDenseRewardsOneTokenEarly(GAEInterface):
    def inference(self, model, data, mb_spec):
        early = data.select(data.keys)
        early.data["dense_rewards"] = early.data["dense_rewards"].roll(1)
        return super().inference(model, early, mb_spec)


@pytest.mark.parametrize("reward_delta", [True, False])
def test_dense_rewards_that_are_read_one_token_early_are_found(reward_delta):
    settings = {"use_dense_reward": True, "reward_delta": reward_delta}
    check = AdvantageChecks().test_a_reward_of_a_token_counts_for_the_action_that_chose_it
    for cls in (GAEInterface, GroupRelativeInterface):
        check(rating(partial(cls, **settings)))
    with pytest.raises(Violation, match="raise its last advantage by"):
        check(rating(partial(ReadsDenseRewardsOneTokenEarly, **settings)))


def test_a_flag_that_is_refused_with_these_arguments_is_not_tried():
    """Without a penalty, `adaptive_kl_ctl` is an error."""

    class Subject(DescribedArgumentChecks):
        name = "group_relative"

    def make(**changes):
        return make_interface(ModelInterfaceAbstraction(Subject.name, {"kl_ctl": 0.0, **changes}))

    batches = inference_batches_for(make(), usual_batches(make()), DigitTokenizer())
    inferring = CallTrial(make, "inference", batches(), DigitTokenizer())
    Subject().test_a_change_in_a_score_has_no_zero(inferring, batches)
