"""How an agent differs from torchrun: other ranks are ended at once,
and agents meet in the run's store."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import psutil
import pytest
import zmq
from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.run import config_from_args, parse_args

from rlcli.errors import HangError
from rlcli.launch import node
from rlcli.launch.memory_kills import count_memory_kills
from rlcli.launch.node import torchrun_arguments
from rlcli.messaging.control import CONTROL_FILE, Control
from rlcli.messaging.zmq_master import ZmqMaster


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


@pytest.fixture
def masters(tmp_path):
    """Start masters that write where to reach them into the folder of the test."""
    started = []

    def start():
        started.append(ZmqMaster(tmp_path, 1, lambda patience: None, "127.0.0.1"))
        return started[-1]

    yield start
    for master in started:
        master.close()


@pytest.fixture
def find_master(tmp_path, monkeypatch):
    """Do what an agent does first. `by_hand`: whether it was started by hand."""
    monkeypatch.setattr(node, "ANSWERED_WITHIN", 0.1)

    def find(*, by_hand):
        launch = mock.Mock(by_hand=by_hand)
        monkeypatch.setattr(node, "read_recipe", lambda run_dir: mock.Mock(launch=launch))
        with zmq.Context() as context:
            return node._find_master(context, tmp_path, tmp_path)

    return find


@pytest.fixture
def left_behind(masters, tmp_path):
    """What a killed master has left."""
    master = masters()
    control = Control.read(tmp_path)
    master.close()
    control.write(tmp_path)
    return control


def test_an_agent_started_by_hand_waits_for_the_next_master_if_the_last_one_was_killed(
    find_master, left_behind, masters, tmp_path, capsys
):
    with ThreadPoolExecutor() as threads:
        agent = threads.submit(find_master, by_hand=True)
        warning = ""
        while not (warning := warning + capsys.readouterr().err):
            assert not agent.done()
            time.sleep(0.02)
        (tmp_path / CONTROL_FILE).unlink()  # as the next master does
        time.sleep(0.3)
        masters()
        control = agent.result(60)
    assert warning.startswith("rlcli: the first node does not answer; waiting until it is started")
    assert control == Control.read(tmp_path) != left_behind


@pytest.mark.parametrize(
    ("folder", "words"), [(".", "to begin the run"), ("typo", "a folder that is not here yet")]
)
def test_an_agent_that_waits_for_a_run_names_its_folder(
    tmp_path, monkeypatch, capsys, folder, words
):
    monkeypatch.setattr(node, "BEGUN_WITHIN", 0.0)
    run = tmp_path / folder
    with zmq.Context() as context, pytest.raises(HangError, match="no run has begun"):
        node._find_master(context, run, run / "meeting")
    warning = capsys.readouterr().err
    assert str(run) in warning
    assert words in warning


def test_an_agent_of_a_launcher_takes_what_there_is(find_master, left_behind):
    assert find_master(by_hand=False) == left_behind


def test_an_agent_started_by_hand_finds_a_running_master(find_master, masters, tmp_path, capsys):
    masters()
    assert find_master(by_hand=True) == Control.read(tmp_path)
    assert capsys.readouterr().err == ""


def test_out_of_memory_kills_are_read_from_the_control_group(tmp_path):
    (tmp_path / "membership").write_text("0::/job/step\n")
    assert count_memory_kills(tmp_path / "membership", tmp_path) is None
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "job/step/memory.events").write_text("low 0\nhigh 7\noom 3\noom_kill 2\n")
    assert count_memory_kills(tmp_path / "membership", tmp_path) == 2
    (tmp_path / "membership").write_text("4:memory:/job\n")
    assert count_memory_kills(tmp_path / "membership", tmp_path) is None


def test_an_agent_reports_the_signals_that_it_heeds_and_continues(capsys):
    pulse, before = mock.Mock(), signal.getsignal(signal.SIGTERM)
    try:
        node._report_signals([signal.SIGTERM], pulse)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    pulse.tell.assert_called_once_with(asked_to_stop=signal.SIGTERM)
    assert capsys.readouterr().err == "rlcli: SIGTERM: the run ends after its step\n"
