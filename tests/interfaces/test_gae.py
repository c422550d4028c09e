"""`InterfaceContract` has what holds for any call that takes the batch; the numbers of PPO are in
test_ppo_actor.py."""

import math

import pytest
import torch

from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import tiny_model


class TestContract(InterfaceContract):
    name = "gae"
    args = {"adaptive_kl_ctl": True, "adaptive_kl_horizon": 100.0}


def test_rewards_are_clipped_after_they_are_scaled():
    """rewards of 1 times 3 are above 2, those of 0 are not: clipped are as many as are 1"""
    batch = make_batch(GAEInterface().reads("inference").needed)
    scaled = GAEInterface(reward_output_scaling=3.0, max_reward_clip=2.0)
    output = scaled.inference(tiny_model(), batch, MicroBatchSpec())
    clipped = [total for total, _ in output.metadata["reward_clip_fraction"]]
    assert sum(clipped) == batch.data["rewards"].sum()
    assert sum(clipped) > 0


def test_the_coefficient_follows_the_kl_of_whole_responses():
    """With the same distance from the reference at each action, a response's KL grows with its
    length: at 1.1 times the target, N responses of a horizon of 100 raise it by N / 10 %."""
    settings = {"adaptive_kl_ctl": True, "kl_ctl": 0.1, "adaptive_kl_horizon": 100.0}
    batch = make_batch(GAEInterface(**settings).reads("inference").needed)
    batch.data["packed_ref_logprobs"] = batch.data["packed_logprobs"] - 0.5
    responses = len(batch.flat_seqlens("packed_input_ids"))
    of_an_action = math.exp(-0.5) - 1 + 0.5
    kl = of_an_action * int((~batch.data["prompt_mask"]).sum()) / responses
    gae = GAEInterface(**settings, adaptive_kl_target=kl / 1.1)
    gae.inference(tiny_model(), batch, MicroBatchSpec())
    expected = 0.1 * (1 + 0.1 * responses / 100)
    assert gae.controller.coef == pytest.approx(expected, rel=1e-6)


def test_responses_that_are_not_chosen_are_masked():
    """the better one of the two responses to each prompt is trained on"""
    batch = make_batch(GAEInterface().reads("inference").needed)
    output = GAEInterface(train_on_best=1).inference(tiny_model(), batch, MicroBatchSpec())
    actions = [length - 1 for length in batch.flat_seqlens("packed_input_ids")]
    is_trained = torch.stack([mask.any() for mask in output.data["loss_mask"].split(actions)])
    assert torch.equal(is_trained, output.data["chosen"])
    assert int(is_trained.sum()) == batch.bs


def test_dense_rewards_are_changes_of_the_score_or_the_scores():
    """without a critic, an action's return is the last score less the one before it; without
    reward_delta, the sum of the scores after it"""
    settings = {"use_dense_reward": True, "disable_value": True, "kl_ctl": 0.0}
    batch = make_batch(GAEInterface(**settings).reads("inference").needed, [[(1, 4)]])
    scores = batch.data["dense_rewards"]
    changes, sums = (
        GAEInterface(**settings, reward_delta=delta)
        .inference(tiny_model(), batch, MicroBatchSpec())
        .data["returns"]
        for delta in (True, False)
    )
    torch.testing.assert_close(changes, scores[-1] - scores[:-1])
    torch.testing.assert_close(sums, scores[1:].flip(0).cumsum(0).flip(0))
