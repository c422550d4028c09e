"""How an agent differs from torchrun: other ranks are ended at once,
and agents meet in the run's store."""

import os
import signal
import subprocess
import sys
from unittest import mock

import psutil
import pytest
from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.run import config_from_args, parse_args

from rlcli.launch import node
from rlcli.launch.memory_kills import count_memory_kills
from rlcli.launch.node import torchrun_arguments


@pytest.fixture
def registry(monkeypatch):
    """torch's table of rendezvous, of which this test may change a copy."""
    fresh = rendezvous.RendezvousHandlerRegistry()
    monkeypatch.setattr(rendezvous, "rendezvous_handler_registry", fresh)
    return fresh


def parameters():
    return rendezvous.RendezvousParameters("rlcli", "", "run", 2, 2)


def test_ranks_that_remain_are_ended_by_sigkill(monkeypatch, tmp_path, registry):
    """torch asks a private function for the signal; if it no longer does, this test fails."""
    monkeypatch.setattr(api, "_get_default_signal", lambda: signal.SIGTERM)
    recipe = mock.Mock(cluster=mock.Mock(nodes=1, devices_per_node=1))
    with mock.patch("torch.distributed.run.run"):
        assert node._run_ranks(recipe, tmp_path, HashStore(), 0, {}) == {}
    api.PContext.close(context := mock.Mock(_tail_logs=[]))
    context._close.assert_called_once_with(death_sig=signal.SIGKILL, timeout=mock.ANY)


def test_agents_keep_their_node_numbers_and_open_no_port(registry):
    shared = HashStore()
    node._meet_in(PrefixStore("agents", shared), 1, 2)
    listening = {
        c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN
    }
    second = registry.create_handler(parameters()).next_rendezvous()
    assert (second.rank, second.world_size) == (1, 2)
    second.store.set("key", b"value")
    assert {
        c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN
    } == listening
    fresh = rendezvous.RendezvousHandlerRegistry()
    with mock.patch.object(rendezvous, "rendezvous_handler_registry", fresh):
        node._meet_in(PrefixStore("agents", shared), 0, 2)
    assert fresh.create_handler(parameters()).next_rendezvous().store.get("key") == b"value"


def test_torchrun_parses_the_arguments_of_an_agent(tmp_path):
    config, _, arguments = config_from_args(parse_args(torchrun_arguments(tmp_path, 2, 4, 1)))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (
        2,
        2,
        4,
        0,
    )
    assert config.rdzv_backend == "rlcli"
    assert arguments[-1] == str(tmp_path)


def test_a_child_that_is_reaped_while_children_are_checked_has_ended():
    child = subprocess.Popen([sys.executable, "-c", ""])
    reaped = psutil.Process(child.pid)
    child.wait()
    children = [reaped, psutil.Process()]
    with mock.patch.object(psutil.Process, "children", return_value=children):
        assert node._living_children() == {os.getpid()}


def test_out_of_memory_kills_are_read_from_the_control_group(tmp_path):
    (tmp_path / "membership").write_text("0::/job/step\n")
    assert count_memory_kills(tmp_path / "membership", tmp_path) is None
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "job/step/memory.events").write_text("low 0\nhigh 7\noom 3\noom_kill 2\n")
    assert count_memory_kills(tmp_path / "membership", tmp_path) == 2
    (tmp_path / "membership").write_text("4:memory:/job\n")
    assert count_memory_kills(tmp_path / "membership", tmp_path) is None
