"""Activations that the backward pass computes again, or that wait in host memory."""

from typing import ClassVar

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from rlcli.backends._recomputation import _moved_to_host, _policy
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.objectives import train

SELECTIVE = {"gradient_checkpointing": True, "recompute": "selective"}
aten = torch.ops.aten


class Subject(BackendContract):
    name = "fsdp"


class Deepspeed(BackendContract):
    name = "deepspeed"
    args: ClassVar = {"zero_stage": 1}


def assert_same_weights(*engines):
    for first, *others in zip(*(engine.lm.parameters() for engine in engines), strict=True):
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("recomputes", "passes"), [(False, 1), (True, 2)])
def test_layers_are_recomputed_only_with_gradient_checkpointing(recomputes, passes):
    engine = Subject().engine(gradient_checkpointing=recomputes)
    seen = []
    engine.lm.base_model.layers[0].mlp.register_forward_pre_hook(
        lambda *_: seen.append(torch.is_grad_enabled())
    )
    train(engine, 0)
    assert seen == [True] * passes
    assert not any(module.training for module in engine.lm.modules())


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral", "qwen2_moe"])
def test_selective_recomputation_repeats_no_product_with_a_weight_and_changes_no_bit(family):
    engines = [
        Subject().engine(family, **settings)
        for settings in ({}, SELECTIVE, {"gradient_checkpointing": True})
    ]
    products = []
    for engine in engines:
        with FlopCounterMode(display=False) as counter:
            train(engine, 0)
        by_operation = counter.get_flop_counts()["Global"]
        products.append(sum(by_operation.get(each, 0) for each in (aten.mm, aten.addmm)))
    assert products[0] == products[1] < products[2]
    assert_same_weights(*engines)


def test_selective_recomputation_keeps_products_with_weights_and_the_results_of_attention():
    on_gpus = aten._scaled_dot_product_flash_attention.default
    on_cpus = aten._scaled_dot_product_flash_attention_for_cpu.default
    for operation in (aten.mm.default, aten.addmm.default, on_gpus, on_cpus):
        assert _policy(None, operation) == CheckpointPolicy.MUST_SAVE
    for operation in (aten.bmm.default, aten.silu.default):
        assert _policy(None, operation) == CheckpointPolicy.PREFER_RECOMPUTE


@pytest.fixture
def copied(monkeypatch):
    """The shapes of tensors that are copied to host memory, as if this process had none."""
    shapes = []

    def to_host(tensor):
        saved = _moved_to_host(tensor)
        if saved is not tensor:
            shapes.append(tuple(tensor.shape))
        return saved

    monkeypatch.setattr("rlcli.backends._recomputation._is_on_host", lambda tensor: False)
    monkeypatch.setattr("rlcli.backends._recomputation._moved_to_host", to_host)
    return shapes


@pytest.mark.parametrize("subject", [Subject(), Deepspeed()], ids=lambda subject: subject.name)
def test_inputs_of_layers_are_copied_to_the_host_and_change_no_bit(copied, subject):
    settings = {**SETTINGS, "gradient_checkpointing": True}
    staying, leaving = (
        subject.engine(**settings, offload_activations=offloads) for offloads in (False, True)
    )
    train(staying, 0)
    assert not copied
    train(leaving, 0)
    config = leaving.lm.config
    hidden_states = [shape for shape in copied if shape[::2] == (1, config.hidden_size)]
    assert len(hidden_states) >= config.num_hidden_layers
    assert all(len(shape) > 1 for shape in copied), "numbers of which a token has but one stay"
    assert not {*copied} & {tuple(parameter.shape) for parameter in leaving.lm.parameters()}
    assert_same_weights(staying, leaving)
