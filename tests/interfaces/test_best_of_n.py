"""Rejection-sampling fine-tuning: which responses are learned,
and that the loss is theirs alone."""

import math

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.best_of_n import BestOfNInterface
from rlcli.interfaces.sft import SFTInterface
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import tiny_model

LENGTHS = [[(2, 5), (2, 3), (2, 3), (2, 4)], [(3, 2), (3, 1), (3, 6), (3, 2)]]
SPEC = MicroBatchSpec()


class TestContract(InterfaceContract):
    name = "best_of_n"
    args = {"minibatches": 2}


class TestContractOfAllRightResponses(InterfaceContract):
    name = "best_of_n"
    args = {"keep": "solved", "minibatches": 1}


def rollout(rewards, solved=None):
    """Two prompts with four responses each."""
    data = make_batch(["packed_input_ids", "prompt_mask", "rewards", "solved"], LENGTHS)
    data.data["rewards"] = torch.tensor(rewards)
    data.data["solved"] = torch.tensor(solved or [False] * 8)
    return data


def only(data, indices):
    """The responses with these indices, as a batch of one response to each prompt or none."""
    tokens = data.data["packed_input_ids"].split(data.flat_seqlens("packed_input_ids"))
    masks = data.data["prompt_mask"].split(data.flat_seqlens("prompt_mask"))
    return SequenceSample.from_default(
        ids=[f"r{index}" for index in indices],
        seqlens={
            key: [[len(tokens[index])] for index in indices]
            for key in ("packed_input_ids", "prompt_mask")
        },
        data={
            "packed_input_ids": torch.cat([tokens[index] for index in indices]),
            "prompt_mask": torch.cat([masks[index] for index in indices]),
        },
    )


def learned(data, **settings):
    """(stats, gradient) of one optimizer step."""
    model = tiny_model()
    stats = BestOfNInterface(minibatches=1, **settings).train_step(model, data, SPEC)
    return stats, model.module.gradient


@pytest.mark.parametrize(
    ("settings", "rewards", "solved", "indices"),
    [
        ({}, [0.0, 2.0, 1.0, 0.5, 1.0, 0.0, 3.0, 0.0], None, [1, 6]),
        # of equals the shorter, then the earlier
        ({}, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], None, [1, 5]),
        ({"best": 2}, [0.0, 2.0, 1.0, 0.5, 1.0, 0.0, 3.0, 0.0], None, [1, 2, 4, 6]),
        ({"min_reward": 2.5}, [0.0, 2.0, 1.0, 0.5, 1.0, 0.0, 3.0, 0.0], None, [6]),
        ({"keep": "solved"}, [0.0] * 8, [True, False, True, False] + [False] * 4, [0, 2]),
        (
            {"keep": "solved", "min_reward": 1.0},
            [1.0, 0.0, 0.0] + [0.0] * 5,
            [True, False, True] + [False] * 5,
            [0],
        ),
        ({"best": 9}, [0.0] * 8, None, range(8)),
    ],
)
def test_loss_and_gradient_are_those_of_sft_on_the_chosen_responses(
    settings, rewards, solved, indices
):
    """loss and gradient are those of sft on the chosen responses"""
    data, model = rollout(rewards, solved), tiny_model()
    stats, gradient = learned(data, **settings)
    expected = SFTInterface().train_step(model, only(data, list(indices)), SPEC)
    assert stats["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for name, expected_gradient in model.module.gradient.items():
        torch.testing.assert_close(gradient[name], expected_gradient, atol=1e-9, rtol=1e-6)
    assert stats["kept_fraction"] == pytest.approx(len(indices) / 8)
    assert stats["kept_reward"] == pytest.approx(
        sum(rewards[index] for index in indices) / len(indices)
    )
    assert stats["prompts_without"] == (
        0.5 if all(index < 4 for index in indices) or indices == [6] else 0
    )


def test_nothing_is_learned_without_a_right_response():
    """a step without a right response changes nothing"""
    stats, _ = learned(rollout([0.0] * 8), keep="solved")
    assert stats["update_skipped"] == 1
    assert stats["prompts_without"] == 1
    assert stats["kept_fraction"] == 0
    assert "kept_reward" not in stats
    assert math.isfinite(stats["loss"])


def test_unknown_ways_to_keep_are_refused():
    """unknown ways to keep are refused"""
    with pytest.raises(ValueError, match="keep is 'worst'; it must be one of best, solved"):
        BestOfNInterface(keep="worst")


def test_a_least_reward_of_zero_is_compared_with_rewards():
    least = BestOfNInterface(keep="solved", min_reward=0.0)
    assert "rewards" in least.reads("train_step").needed
    assert "rewards" not in BestOfNInterface(keep="solved").reads("train_step").needed
