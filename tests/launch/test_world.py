"""What the master makes of what agents say, and of what they no longer say."""

import json
from types import SimpleNamespace

import pytest

from rlcli.errors import HangError, ResourceError, WorkerError
from rlcli.launch.launcher import Death
from rlcli.launch.memory_kills import explain_kill
from rlcli.launch.world import World
from rlcli.runtime.pulse import LOST_AFTER
from rlcli.topology.groups import Group

RANKS = Group("ranks", "ranks", (0, 0, 1, 1))


@pytest.fixture
def exits():
    """Node → exit code of its agent."""
    return {}


def recipe(interface="lo"):
    return SimpleNamespace(
        cluster=SimpleNamespace(nodes=2),
        launch=SimpleNamespace(startup_deadline=0.5, interface=interface, by_hand=True),
    )


@pytest.fixture
def world(tmp_path, exits):
    (tmp_path / "logs").mkdir()
    made = World(recipe(), RANKS, tmp_path, tmp_path / "own", exits.get)
    made.transport.pids.update({0: 100, 1: 101, 2: 102, 3: 103})
    yield made
    made.close()
    assert not (tmp_path / "meeting").exists()


def say(world, node, **told):
    world.transport.pulses.facts["node", node] = {"pid": 10 + node, **told}


def test_the_rank_that_an_agent_reports_is_the_one_that_died(world, exits):
    say(world, 0)
    estimate = {"device": "cpu", "bytes": 3 << 30, "within_percent": 20, "call": "actor_train", "phase": "update"}
    (world._logs.parent / "memory.json").write_text(json.dumps(estimate))
    say(world, 1, rank=3, exit=-9, out_of_memory=True, memory=5 << 30)
    exits[1] = 7
    assert world.deaths() == [Death("ranks", 3, 1, -9, True)]
    with pytest.raises(WorkerError, match=r"rank 3 was killed by SIGKILL \(out of memory\)") as raised:
        world._check_alive(LOST_AFTER)
    assert raised.value.where == "node 1, rank 3 pid 103"
    assert "it held 5.00 GiB when last seen" in raised.value.what
    assert "the memory plan has at most 3.00 GiB for it, within 20 % (actor_train, update)" in raised.value.what


@pytest.mark.parametrize(
    ("code", "out_of_memory", "estimate", "expected"),
    [
        (-15, None, {}, ""),
        (-9, False, {}, ""),
        (-9, None, {}, "; it held 1.00 GiB when last seen"),
        (-9, True, {"device": "cuda", "bytes": 1, "within_percent": 5}, "; the memory plan is about the devices'"),
        (-9, True, {"bytes": "much"}, "; it held 1.00 GiB when last seen"),
    ],
)
def test_what_is_said_of_memory(tmp_path, code, out_of_memory, estimate, expected):
    (tmp_path / "memory.json").write_text(json.dumps(estimate))
    said = explain_kill(code, out_of_memory, 1 << 30, tmp_path)
    assert expected in said
    assert bool(said) == bool(expected)


def test_all_ranks_of_an_agent_die_with_it(world, exits):
    say(world, 1)
    assert world.deaths() == []
    exits[1] = -9
    assert world.deaths() == [Death("ranks", 2, 1, -9), Death("ranks", 3, 1, -9)]
    with pytest.raises(WorkerError, match="node 1 is lost, and with it ranks 2-3: its agent was killed by SIGKILL"):
        world._check_alive(LOST_AFTER)


def test_an_agent_that_cannot_run_its_ranks_says_why(world):
    say(world, 1, failure="RuntimeError: no room")
    with pytest.raises(WorkerError, match=r"node 1 is lost.*RuntimeError: no room"):
        world._check_alive(LOST_AFTER)


def test_a_rank_that_left_with_exit_code_0_is_named(world, monkeypatch):
    monkeypatch.setattr("rlcli.launch.world.REPORT_WITHIN", 0.1)
    say(world, 1, gone=[102, 999])
    with pytest.raises(WorkerError, match="rank 2 ended with exit code 0 before the run was over"):
        world._check_alive(LOST_AFTER)
    world.transport.has_let_go = True
    world._check_alive(LOST_AFTER)


def test_an_agent_that_is_silent_is_lost(world):
    say(world, 1)
    now = world.transport._listening_since
    world.transport.pulses.heard["node", 1] = now
    world._check_alive(LOST_AFTER)
    world.transport._listening_since = world.transport.pulses.heard["node", 1] = now - 16
    with pytest.raises(WorkerError, match=r"node 1 is lost.*has not been heard for 1\d s"):
        world._check_alive(LOST_AFTER)
    say(world, 1, is_over=True)
    world._check_alive(LOST_AFTER)


def test_the_last_lines_of_its_log_are_shown(world, tmp_path):
    (tmp_path / "logs/rank3.log").write_text("loading\nSegmentation fault\n")
    say(world, 1, rank=3, exit=-11)
    with pytest.raises(WorkerError, match=r"last lines of rank3\.log:\n.*loading\n.*Segmentation fault"):
        world._check_alive(LOST_AFTER)


def test_a_node_that_does_not_come_is_named(world):
    say(world, 0)
    with pytest.raises(HangError, match="node 1 has not come within 0 s") as raised:
        world.wait()
    assert "rlcli.launch.node" in raised.value.hint


def test_an_interface_that_is_not_there(tmp_path):
    with pytest.raises(ResourceError, match="there is no network interface 'nonesuch'") as raised:
        World(recipe("nonesuch"), RANKS, tmp_path, tmp_path, lambda node: None)
    assert "lo" in raised.value.hint
    assert not (tmp_path / "meeting").exists()
