"""deepspeed: the contract under ZeRO 1 and 3, what ranks do under 0 and 2, and with state in host memory."""

import logging
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlcli.errors import UsageError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS, train
from rlcli.testing.backend.ranks import RanksChecks
from rlcli.testing.backend.training import TrainingChecks
from rlcli.testing.ranks import run_on_ranks


class TestStage1(BackendContract):
    name = "deepspeed"
    args = {"zero_stage": 1}


class TestStage0(RanksChecks, TrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 0}
    families = ("llama",)


class TestStage2(RanksChecks, TrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 2}
    families = ("llama",)


class TestStage3(BackendContract):
    name = "deepspeed"
    args = {"zero_stage": 3}


class TestOffloadedOptimizer(RanksChecks, TrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 2, "offload_optimizer": True}
    families = ("llama",)


class TestOffloadedParameters(RanksChecks, TrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}
    families = ("llama",)


@pytest.mark.parametrize("stage", [1, 3])
def test_roles_are_on_some_ranks_of_a_run(stage):
    """Two roles on a rank of their own and one on two ranks, each without waiting for the others."""

    class Checks(BackendContract):
        name = "deepspeed"
        args = {"zero_stage": stage}

    alone = train(Checks().engine(**SETTINGS), 0)

    def work(rank):
        pair = DeviceMesh("cpu", torch.tensor([1, 2]), mesh_dim_names=("dp",))
        engine = Checks().engine(mesh=None if rank == 0 else pair, **SETTINGS)
        found = train(engine, 0)
        assert dist.get_world_size() == 3
        return found

    first, *pair = run_on_ranks(3, work)
    assert first == pytest.approx(alone, rel=1e-5)
    for found in pair:  # both ranks have the whole batch: every token counts twice
        assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        assert found["loss_weight"] == 2 * alone["loss_weight"]


def test_the_library_takes_nothing_over():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    product, root = torch.nn.functional.linear, list(logging.getLogger().handlers)
    engine = TestStage3().engine(**SETTINGS)
    train(engine, 0)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert torch.nn.functional.linear is product
    assert logging.getLogger().handlers == root
    assert not logging.getLogger("DeepSpeed").handlers
    assert not dist.is_initialized()


def test_settings_that_do_not_go_together():
    for args in ({"zero_stage": 0, "offload_optimizer": True}, {"zero_stage": 2, "offload_parameters": True}):
        with pytest.raises(UsageError):
            TestStage1().backend(**args)
