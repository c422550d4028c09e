"""sglang: the contract over a fake server with a real model, and the process group that weights
travel in."""

import time
from contextlib import ExitStack

import psutil
import pytest
from attached_engines import Attached, follow

from rlcli.errors import WorkerError
from rlcli.testing.backend.base import FAMILIES


@pytest.mark.long
class TestContract(Attached):
    families = ("llama", "gpt2")


@pytest.mark.exhaustive
class TestContractFromDisk(TestContract):
    families = FAMILIES
    update = "disk"

    def test_tokens_are_drawn_as_settings_say(self):
        pytest.skip("tested above, and independent of how weights are updated")


class TestContractOfTwoServers(TestContractFromDisk):
    servers = 2
    families = ("llama",)
    update = "process_group"


@pytest.fixture
def engine_with_process_group(tmp_path):
    """An engine that sends its weights in a process group."""
    checks = Attached()
    checks.tmp_path, checks.fakes = tmp_path, []
    with ExitStack() as checks.stack:
        yield checks.engine("llama"), checks.fakes


def test_a_refused_process_group_fails_the_update_at_once(engine_with_process_group):
    engine, fakes = engine_with_process_group
    fakes[0].fail("/update_weights_from_distributed", "refuse", "refuse")
    began = time.monotonic()
    with pytest.raises(WorkerError, match="as ordered"):
        follow(engine, seed=7)
    assert time.monotonic() - began < 15


def test_an_update_whose_connection_has_broken_is_repeated(engine_with_process_group):
    engine, (fake,) = engine_with_process_group
    fake.fail("/update_weights_from_distributed", "reset")
    follow(engine, seed=7)
    assert fake.label == engine._servers.label(engine.weights_number)


def test_an_update_that_a_killed_run_has_left_open_is_ended(engine_with_process_group):
    engine, (fake,) = engine_with_process_group
    fake._is_open = True
    follow(engine, seed=7)
    assert fake.label == engine._servers.label(engine.weights_number)
    assert not fake._is_open


def test_updates_leave_no_threads_behind(engine_with_process_group):
    """A process group has three threads on each side, one of which wakes up 100 times a second."""
    engine, _ = engine_with_process_group
    follow(engine, seed=0)
    before = psutil.Process().num_threads()
    for seed in range(1, 4):
        follow(engine, seed)
    assert psutil.Process().num_threads() < before + 3
