"""Batch inference, and `InterfaceContract` over it."""

import pytest
import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.generation import GenerationInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import tiny_model


class TestContract(InterfaceContract):
    name = "generation"


def test_the_responses_equal_those_of_ppo_actor():
    """the responses are those of ppo_actor at the same settings"""
    settings = GenerationHyperparameters(responses_per_prompt=3, max_new_tokens=5, temperature=0.8)
    prompts, model = make_batch(["packed_prompts"]), tiny_model()
    model.tokenizer = DigitTokenizer()
    mine = GenerationInterface(generation=settings).generate(model, prompts, MicroBatchSpec())
    theirs = PPOActorInterface(generation=settings).generate(model, prompts, MicroBatchSpec())
    for key in ("packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask"):
        assert torch.equal(mine.data[key], theirs.data[key])
    assert mine.seqlens == theirs.seqlens


def test_settings_may_come_as_a_mapping():
    """settings may come as a mapping, as recipes have them"""
    assert GenerationInterface(generation={"greedy": True}).generation == GenerationHyperparameters(
        greedy=True
    )
    with pytest.raises(TypeError):
        GenerationInterface(generation={"greed": True})
