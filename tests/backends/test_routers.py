"""Losses of routers: what they cost, and what they refuse. Their numbers are for the contract."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlcli.api.config import MicroBatchSpec
from rlcli.backends import _routers
from rlcli.errors import ModelError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.objectives import answer_loss, answer_weight
from rlcli.testing.backend.samples import batch
from rlcli.testing.tiny_models import tiny_config


class Subject(BackendContract):
    name = "fsdp"


def trained_step(micro_batches=3, **settings):
    """The stats of a step, and whether each forward pass of it had gradients."""
    engine = Subject().engine("mixtral", **SETTINGS, **settings)
    passes = []
    engine.lm.base_model.register_forward_pre_hook(
        lambda *_: passes.append(torch.is_grad_enabled())
    )
    stats = engine.train_batch(
        batch(), answer_loss, answer_weight, mb_spec=MicroBatchSpec(n_mbs=micro_batches)
    )
    return stats, passes


@pytest.mark.parametrize(
    ("micro_batches", "coefficients", "counting"),
    [
        (1, {"router_aux_loss_coef": 0.1}, 0),
        (3, {"router_aux_loss_coef": 0.1}, 2),
        (3, {"router_aux_loss_coef": 0.0}, 0),
        (3, {"router_z_loss_coef": 0.1}, 0),
    ],
)
def test_only_the_auxiliary_loss_of_several_micro_batches_takes_more_passes(
    micro_batches, coefficients, counting
):
    _, passes = trained_step(micro_batches, **coefficients)
    assert passes == [False] * counting + [True] * micro_batches


def test_a_coefficient_of_zero_only_measures():
    plain, _ = trained_step()
    measured, _ = trained_step(router_aux_loss_coef=0)
    assert {name: measured[name] for name in plain} == plain
    assert measured["router_aux_loss"] >= 1
    assert measured["router_load_max"] > 1 > measured["router_load_min"]


def test_the_load_is_that_of_the_experts_that_a_corrected_choice_prefers():
    """ERNIE adds a bias to the scores by which it chooses: here all tokens go to two of four."""
    config = tiny_config("qwen3_moe").to_dict()
    sizes = {name: config[name] for name in ("vocab_size", "hidden_size", "num_attention_heads",
             "num_key_value_heads", "num_hidden_layers", "moe_intermediate_size")}  # fmt: skip
    lm = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("ernie4_5_moe", **sizes, moe_num_experts=4, moe_k=2)
    )
    for name, parameter in lm.named_parameters():
        if "e_score_correction_bias" in name:
            parameter.data[:] = torch.tensor([9.0, 0.0, 0.0, 9.0])
    engine = Subject().engine(lm=lm, router_aux_loss_coef=0.1)
    stats = engine.train_batch(batch(), answer_loss, answer_weight)
    assert (stats["router_load_max"], stats["router_load_min"]) == (2, 0)


def test_routers_that_return_probabilities_are_refused(monkeypatch):
    monkeypatch.setattr(_routers.Routers, "_observe", _observing_softmax(_routers.Routers._observe))
    with pytest.raises(ModelError, match="do not return logits"):
        trained_step(router_z_loss_coef=0.1)


def _observing_softmax(observe):
    """As the routers of transformers 5.3, whose first output is the softmax."""
    return lambda self, module, inputs, outputs: observe(
        self, module, inputs, (outputs[0].softmax(-1), *outputs[1:])
    )
