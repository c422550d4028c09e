"""deepspeed: the contract under ZeRO 1 and 3, the checks of ranks under 0 and 2 and with state in
host memory, and checkpoints shared with fsdp."""

import gc
import logging
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlcli.backends._zero import configuration, import_deepspeed
from rlcli.errors import UsageError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.differences import weights_apart
from rlcli.testing.backend.lifecycle import held_bytes
from rlcli.testing.backend.objectives import train
from rlcli.testing.backend.ranks import RanksChecks
from rlcli.testing.backend.state import StateChecks, restore, save
from rlcli.testing.backend.training import BackendTrainingChecks
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model

# ranks that wait for each other are found by the contract itself
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", autouse=True)
def library():
    """Loaded, and frozen for the garbage collector: with every engine of stage 3 the library has it
    scan all objects of the process."""
    import_deepspeed(torch.device("cpu"))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.long
class TestStage1(BackendContract):
    name = "deepspeed"
    args = {"zero_stage": 1}
    families = ("llama", "gpt2")


@pytest.mark.exhaustive
class TestStage0(RanksChecks, BackendTrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 0}
    families = ("llama",)


@pytest.mark.exhaustive
class TestStage2(RanksChecks, BackendTrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 2}
    families = ("llama",)


@pytest.mark.exhaustive
class TestStage3(BackendContract):
    name = "deepspeed"
    args = {"zero_stage": 3}


@pytest.mark.exhaustive
class TestOffloadedOptimizer(RanksChecks, BackendTrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 2, "offload_optimizer": True}
    families = ("llama",)


@pytest.mark.exhaustive
class TestOffloadedParameters(RanksChecks, BackendTrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}
    families = ("llama",)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
def test_engines_on_disjoint_ranks_of_a_run_train_independently(stage):
    """An engine on a single rank and one on two other ranks train without waiting for each
    other."""

    class Checks(BackendContract):
        name = "deepspeed"
        args = {"zero_stage": stage}

    alone = train(Checks().engine(**SETTINGS), 0)

    def work(rank):
        pair = DeviceMesh("cpu", torch.tensor([1, 2]), mesh_dim_names=("dp",))
        engine = Checks().engine(mesh=None if rank == 0 else pair, **SETTINGS)
        stats = train(engine, 0)
        assert dist.get_world_size() == 3
        return stats

    first, *pair = run_on_ranks(3, work)
    assert first == pytest.approx(alone, rel=1e-5)
    for stats in pair:  # both ranks have the whole batch: every token counts twice
        assert stats["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        assert stats["loss_weight"] == 2 * alone["loss_weight"]


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_are_stored_only_once(stage):
    """On two ranks, before the first step: all of them, or half of each in stage 3,
    in addition to the library's buffers."""

    def work(rank):
        class Checks(BackendContract):
            name = "deepspeed"
            args = {"zero_stage": stage}

        lm = tiny_model(hidden_size=128)
        before = held_bytes()
        engine = Checks().engine(lm=lm, mesh=mesh_of_ranks(dp=2), **SETTINGS)
        scratch = sum(buffer.nbytes for buffer in engine._zero.scratch())
        return {"kept": (held_bytes() - before - scratch) / sum(p.nbytes for p in lm.parameters())}

    for rank in run_on_ranks(2, work):
        assert rank["kept"] == pytest.approx(0.5 if stage == 3 else 1.0, abs=0.1)


ENGINES = {
    "fsdp": ("fsdp", {}),
    "deepspeed 1": ("deepspeed", {"zero_stage": 1}),
    "deepspeed 3": ("deepspeed", {"zero_stage": 3}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saves", "continues"),
    [("fsdp", "deepspeed 3"), ("deepspeed 3", "fsdp"), ("deepspeed 1", "fsdp")],
)
def test_fsdp_and_deepspeed_continue_each_others_checkpoints(saves, continues, tmp_path):
    """Weights and moments are bit-equal; one step later they differ only by rounding."""

    def engine(name, **changes):
        backend, args = ENGINES[name]
        contract = type("Contract", (BackendContract,), {"name": backend, "args": args})
        return contract().engine(mesh=mesh_of_ranks(dp=2), **SETTINGS, **changes)

    def full_state(engine):
        state = engine.state()
        both = {**state.weights, **state.optimizer}
        return {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
            for name, tensor in both.items()
        }

    def work(rank):
        first, second = engine(saves), engine(continues, seed=1)
        for step in range(2):
            train(first, step)
        save(first, tmp_path, rank)
        dist.barrier()
        restore(second, tmp_path)
        mine, theirs = full_state(first), full_state(second)
        same = mine.keys() == theirs.keys() and all(
            torch.equal(mine[name], theirs[name]) for name in mine
        )
        losses = [train(one, 2)["loss"] for one in (first, second)]
        return {
            "same": same,
            "losses": losses,
            "apart": weights_apart(full_state(second), full_state(first)),
        }

    for rank in run_on_ranks(2, work):
        assert rank["same"]
        assert rank["losses"][1] == pytest.approx(rank["losses"][0], rel=1e-6)
        assert rank["apart"] < 1e-4


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit_of_the_weights(stage, recompute):
    def weights(**settings):
        engine = TestStage1().engine("llama", zero_stage=stage, **settings)
        train(engine, 0)
        return [parameter.detach().clone() for parameter in engine.lm.parameters()]

    recomputed = weights(gradient_checkpointing=True, recompute=recompute)
    assert all(map(torch.equal, weights(), recomputed))


def test_the_library_leaves_signals_logging_torch_and_the_environment_unchanged(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    product, root = torch.nn.functional.linear, list(logging.getLogger().handlers)
    engine = TestStage3().engine(**SETTINGS)
    train(engine, 0)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert torch.nn.functional.linear is product
    assert logging.getLogger().handlers == root
    assert not logging.getLogger("DeepSpeed").handlers
    assert os.environ["LOCAL_RANK"] == "3"
    assert not dist.is_initialized()


def test_closing_a_single_engine_destroys_its_process_group():
    for contract in (TestStage1(), TestStage3()):
        engine = contract.engine(**SETTINGS)
        train(engine, 0)
        engine.close()
        assert not dist.is_initialized()


class HostState(StateChecks):
    name = "deepspeed"
    families = ("llama",)


@pytest.mark.parametrize("offloaded", [TestOffloadedOptimizer, TestOffloadedParameters])
def test_training_with_state_in_host_memory_continues_bit_for_bit(offloaded, tmp_path):
    checks = HostState()
    checks.args = offloaded.args
    checks.test_a_checkpoint_continues_bit_for_bit(tmp_path)


def test_vectors_stay_whole_and_only_what_is_set_is_offloaded():
    shapes = [torch.Size([64, 8]), torch.Size([48]), torch.Size([8])]
    settings = TestStage3().backend(offload_optimizer=True)
    zero = configuration(settings, shapes, torch.device("cpu"))["zero_optimization"]
    assert zero["stage3_param_persistence_threshold"] == 48
    assert "offload_optimizer" in zero
    assert "offload_param" not in zero


def test_contradictory_offload_settings_are_refused():
    for args in (
        {"zero_stage": 0, "offload_optimizer": True},
        {"zero_stage": 2, "offload_parameters": True},
    ):
        with pytest.raises(UsageError):
            TestStage1().backend(**args)
