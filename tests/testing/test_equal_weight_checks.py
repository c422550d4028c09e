"""Policies that are not at distance 0 from themselves, and steps that depend on prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.sft import SFTInterface
from rlcli.ops.packing import action_mask
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.contract import Violation
from rlcli.testing.interface.advantages import AdvantageChecks
from rlcli.testing.interface.equal_weights import EqualWeightChecks
from rlcli.testing.interface.inference_trial import CallTrial
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


def rehearsal_of(cls):
    return Rehearsal(lambda **changes: cls(**changes), usual_batches(cls()))


def test_a_policy_that_ignores_the_temperature_in_training_is_found():
    rehearsal = rehearsal_of(IgnoresTheTemperature)
    with pytest.raises(Violation, match=r"at temperature 0\.5"):
        EqualWeightChecks().test_a_policy_is_at_no_distance_from_itself(rehearsal.make, rehearsal)


def test_a_loss_that_is_divided_by_prompt_tokens_too_is_found():
    with pytest.raises(Violation, match="with short prompts"):
        EqualWeightChecks().test_longer_prompts_change_nothing(rehearsal_of(DividesByAllTokens))


def test_an_advantage_that_depends_on_the_rewards_of_a_whole_group_is_found():
    batch = make_batch(AddsTheReward().reads("inference").needed)
    trial = CallTrial(AddsTheReward, "inference", batch, DigitTokenizer())
    with pytest.raises(Violation, match="all higher by 1"):
        AdvantageChecks().test_shifting_the_rewards_of_a_group_changes_no_advantage(trial)
