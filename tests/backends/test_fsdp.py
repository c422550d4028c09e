"""fsdp: the contract, and what is its own: recomputed layers, whole copies that come and go, files of ranks."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import batch, prompts, train
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.state import save
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model


class TestContract(BackendContract):
    name = "fsdp"
    families = ("llama", "gpt2", "mistral", "gemma2", "gemma3_text", "gpt_neox", "cohere", "granite", "olmo2")


@pytest.mark.parametrize(("recompute", "passes"), [(False, 1), (True, 2)])
def test_layers_are_computed_again_only_if_asked(recompute, passes):
    engine = TestContract().engine(gradient_checkpointing=recompute)
    seen = []
    engine.lm.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    train(engine, 0)
    assert seen == [True] * passes
    assert not any(module.training for module in engine.lm.modules())


def test_two_ranks_hold_a_half_each_and_a_whole_copy_only_while_they_generate(tmp_path):
    def work(rank):
        engine = TestContract().engine(mesh=mesh_of_ranks(dp=2))
        train(engine, 0)
        generate(engine, prompts(), greedy=True)
        with engine.generator() as lm:
            whole = [weakref.ref(parameter) for parameter in lm.parameters()]
            held = sum(parameter.numel() for parameter in lm.parameters())
            del lm
        gc.collect()
        save(engine, tmp_path, rank)
        dist.barrier()
        local = sum(parameter.to_local().numel() for parameter in engine.lm.parameters())
        return {"held": held, "left": sum(ref() is not None for ref in whole), "share": local / held}

    ranks = run_on_ranks(2, work)
    assert all(rank["held"] == sum(p.numel() for p in tiny_model().parameters()) for rank in ranks)
    assert [rank["left"] for rank in ranks] == [0, 0]
    assert [rank["share"] for rank in ranks] == pytest.approx([0.5, 0.5], abs=0.01)
    for part in ("models", "optim"):
        assert sorted(file.name[:11] for file in (tmp_path / part).iterdir()) == ["shard-00001", "shard-00002"]


def test_one_rank_writes_its_weights_as_a_model(tmp_path):
    engine = TestContract().engine()
    engine.forward(batch())
    save(engine, tmp_path)
    assert [file.name for file in (tmp_path / "models").iterdir()] == ["model.safetensors"]


def test_weights_and_moments_move_together():
    engine = TestContract().engine()
    train(engine, 0)
    torch.__future__.set_swap_module_params_on_conversion(True)  # as between CPU and GPU, parameters stay the objects
    try:  # that the optimizer knows
        engine._move(torch.device("meta"))  # no data fit there: what stayed behind shows
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    state = engine.state()
    moved = [tensor for tensor in (*state.weights.values(), *state.optimizer.values()) if tensor.dim()]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert len(moved) == 3 * len(state.weights)
