"""The reference policy; `InterfaceContract` compares its log-probs with the model's."""

import pytest
import torch

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.model import MicroBatchSpec
from rlcli.errors import UsageError
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.registry import make_interface
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import tiny_model


class TestContract(InterfaceContract):
    name = "reference"
    args = {"temperature": 0.7}


def make(**args):
    return make_interface(ModelInterfaceAbstraction("reference", args))


def test_a_policy_that_is_its_own_reference_has_no_kl():
    """actor and reference agree to the last bit"""
    actor = PPOActorInterface(generation={"temperature": 0.8})
    for keys in (["packed_input_ids"], ["packed_input_ids", "prompt_mask"]):
        batch = make_batch(keys)
        mine = actor.inference(tiny_model(), batch, MicroBatchSpec(n_mbs=3)).data["packed_logprobs"]
        its = make(temperature=0.8).inference(tiny_model(), batch, MicroBatchSpec()).data["packed_ref_logprobs"]
        assert torch.equal(mine, its)


def test_a_temperature_that_makes_no_sense_is_refused():
    """a temperature of 0 is refused"""
    with pytest.raises(UsageError, match="temperature is 0"):
        make(temperature=0.0)
