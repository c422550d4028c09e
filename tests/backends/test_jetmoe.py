"""What transformers' JetMoE cannot do is refused with one clear error."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlcli.backends._expert_parallel import distribute_experts
from rlcli.backends._recomputation import recomputed_layers
from rlcli.backends._settings import TransformersTraining
from rlcli.errors import ModelError


@pytest.fixture(scope="module")
def jetmoe():
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("jetmoe", **size, **heads))


def test_experts_that_do_not_take_what_tokens_have_chosen_are_not_divided(jetmoe):
    with pytest.raises(ModelError, match="the experts of the jetmoe of role actor cannot be"):
        distribute_experts(jetmoe, SimpleNamespace(size=lambda: 2), "actor")


def test_a_family_without_recomputation_is_refused(jetmoe):
    with pytest.raises(ModelError, match="does not recompute activations of jetmoe"):
        recomputed_layers(jetmoe, TransformersTraining(gradient_checkpointing=True))
