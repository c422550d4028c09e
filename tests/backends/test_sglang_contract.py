"""sglang: the contract over a fake server with a real model, and the process group that its weights travel in."""

import time
from contextlib import ExitStack

import psutil
import pytest
from attached_engines import Attached, follow

from rlcli.errors import WorkerError


class TestContract(Attached):
    def test_sampling_follows_the_distribution(self):
        pytest.skip("that of the fake's own sampler")


class TestContractFromDisk(TestContract):
    update = "disk"

    def test_ids_without_a_token_are_never_sampled(self):
        pytest.skip("shown above: the way of updates has no part in it")


class TestContractOfTwoServers(TestContractFromDisk):
    servers = 2
    families = ("llama",)
    update = "process_group"


@pytest.fixture
def by_group(tmp_path):
    """An engine that sends its weights in a process group."""
    checks = Attached()
    checks.tmp_path, checks.fakes = tmp_path, []
    with ExitStack() as checks.stack:
        yield checks.engine("llama"), checks.fakes


def test_a_group_that_a_server_refuses_is_given_up_at_once(by_group):
    engine, fakes = by_group
    fakes[0].fail("/update_weights_from_distributed", "refuse", "refuse")
    began = time.monotonic()
    with pytest.raises(WorkerError, match="as ordered"):
        follow(engine, seed=7)
    assert time.monotonic() - began < 15


def test_an_update_leaves_no_thread_behind(by_group):
    """A group has three, here and at the server, one of which wakes up 100 times a second; a run has many updates."""
    engine, _ = by_group
    follow(engine, seed=0)
    before = psutil.Process().num_threads()
    for seed in range(1, 4):
        follow(engine, seed)
    assert psutil.Process().num_threads() < before + 3
