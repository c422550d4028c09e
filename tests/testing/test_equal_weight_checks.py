"""Policies that are not at distance 0 from themselves, and steps that depend on prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from rlcli.api.model import ModelInterface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.sft import SFTInterface
from rlcli.ops.packing import action_mask
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.contract import Violation
from rlcli.testing.interface.advantages import AdvantageChecks
from rlcli.testing.interface.directions import DirectionChecks
from rlcli.testing.interface.equal_weights import EqualWeightChecks, _distances_from_references
from rlcli.testing.interface.inference_trial import CallTrial, batches_with
from rlcli.testing.interface.prompts import PromptChecks
from rlcli.testing.interface.training_trial import Rehearsal, usual_batches


@dataclass(kw_only=True)
class IgnoresTheTemperature(PPOActorInterface):
    def _loss(self, output, batch):
        sampled_at, self.generation = self.generation, replace(self.generation, temperature=1.0)
        try:
            return super()._loss(output, batch)
        finally:
            self.generation = sampled_at


@dataclass(kw_only=True)
class DividesByAllTokens(SFTInterface):
    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(data, self.loss, self.weight, mb_spec=mb_spec)

    def loss(self, output, batch):
        lengths = batch.flat_seqlens("packed_input_ids")
        return -output.logprobs[action_mask(batch.data["prompt_mask"], lengths)].sum(), {}

    def weight(self, batch):
        return torch.tensor(len(batch.data["packed_input_ids"]))


@dataclass(kw_only=True)
class AddsTheReward(GroupRelativeInterface):
    """Rewards themselves are added to what compares them."""

    def inference(self, model, data, mb_spec):
        output = super().inference(model, data, mb_spec)
        counts = torch.tensor(output.flat_seqlens("advantages"))
        output.data["advantages"] += 0.1 * torch.repeat_interleave(data.data["rewards"], counts)
        return output


@dataclass(kw_only=True)
class ClipsWhatComesBack(ModelInterface):
    """The larger of both objectives."""

    READS: ClassVar = {
        "train_step": ("packed_input_ids", "advantages", "loss_mask", "old_logprobs")
    }

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(data, self.loss, self.weight, mb_spec=mb_spec)

    def loss(self, output, batch):
        mask, advantages = batch.data["loss_mask"], batch.data["advantages"]
        ratio = (output.logprobs - batch.data["old_logprobs"]).exp()
        objectives = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
        return -self.chosen(*objectives)[mask].sum()

    def chosen(self, plain, clipped):
        return torch.max(plain, clipped)

    def weight(self, batch):
        return batch.data["loss_mask"].count_nonzero()


class ClipsWhatGoesTooFar(ClipsWhatComesBack):
    def chosen(self, plain, clipped):
        return torch.min(plain, clipped)


class WeighsByTheRatio(ClipsWhatComesBack):
    """Nothing is left out."""

    def chosen(self, plain, clipped):
        return plain


def rehearsal_of(cls):
    return Rehearsal(lambda **changes: cls(**changes), usual_batches(cls()))


def test_a_policy_that_ignores_the_temperature_in_training_is_found():
    rehearsal = rehearsal_of(IgnoresTheTemperature)
    with pytest.raises(Violation, match=r"at temperature 0\.5"):
        EqualWeightChecks().test_a_policy_is_at_no_distance_from_itself(rehearsal)


class Scaled:
    """An output whose log-probs are divided by a number."""

    def __init__(self, output, divisor):
        vars(self).update(output=output, divisor=divisor)

    def __getattr__(self, name):
        value = getattr(self.output, name)
        return value / self.divisor if name == "logprobs" else value

    def __setattr__(self, name, value):
        setattr(self.output, name, value)


@dataclass(kw_only=True)
class DividesLogProbs(IgnoresTheTemperature):
    def _loss(self, output, batch):
        return super()._loss(Scaled(output, self.generation.temperature), batch)


@pytest.mark.parametrize("cls", [IgnoresTheTemperature, DividesLogProbs])
def test_a_temperature_that_does_not_divide_logits_is_found(cls):
    with pytest.raises(Violation, match=r"at temperature 0\.5, and .+ where logits are divided"):
        EqualWeightChecks().test_a_temperature_divides_logits(rehearsal_of(cls))


def test_a_loss_that_is_divided_by_prompt_tokens_too_is_found():
    with pytest.raises(Violation, match="with short prompts"):
        PromptChecks().test_longer_prompts_change_nothing(rehearsal_of(DividesByAllTokens))


def test_an_advantage_that_depends_on_the_rewards_of_a_whole_group_is_found():
    batches = batches_with(AddsTheReward().reads("inference"), make_batch)
    trial = CallTrial(AddsTheReward, "inference", batches(), DigitTokenizer())
    with pytest.raises(Violation, match=r"all higher by 0\.7"):
        AdvantageChecks().test_shifting_the_rewards_of_a_group_changes_no_advantage(trial, batches)


@pytest.mark.parametrize("cls", [PPOActorInterface, ClipsWhatGoesTooFar, WeighsByTheRatio])
def test_a_clip_may_stop_what_goes_too_far(cls):
    DirectionChecks().test_what_comes_back_is_not_clipped(rehearsal_of(cls))


def test_a_clip_that_stops_what_comes_back_is_found():
    with pytest.raises(Violation, match="that became likelier, advantages teach nothing that"):
        DirectionChecks().test_what_comes_back_is_not_clipped(rehearsal_of(ClipsWhatComesBack))


@pytest.mark.parametrize(
    ("meaning", "names"),
    [
        ("KL of the policy from the reference", {"kl"}),
        ("KL of the teacher from the student", set()),
    ],
)
def test_the_direction_of_a_distance_is_read_from_its_meaning(meaning, names):
    class Measures(SFTInterface):
        METRICS: ClassVar = {"kl": ("nats per token", meaning)}

    assert _distances_from_references(Measures()) == names
