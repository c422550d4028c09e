"""How the master interprets the reports of agents, and their silence."""

import json
import socket
import threading
import tracemalloc
from types import SimpleNamespace

import psutil
import pytest

from rlcli.errors import HangError, ResourceError, WorkerError
from rlcli.launch import interfaces
from rlcli.launch.launcher import Death
from rlcli.launch.memory_kills import explain_kill
from rlcli.launch.world import World
from rlcli.messaging.messages import RESTARTED
from rlcli.messaging.pulse import LOST_AFTER
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
    world = World(recipe(), RANKS, tmp_path, tmp_path / "own", exits.get)
    world.transport.pids.update({0: 100, 1: 101, 2: 102, 3: 103})
    yield world
    world.close()
    assert not (tmp_path / "meeting").exists()


def set_facts(world, node, **facts):
    world.transport.pulses.facts["node", node] = {"pid": 10 + node, **facts}


def let_ranks_come(world):
    world.transport._identities.update(dict.fromkeys(world.transport._expected, b""))
    for rank in range(4):
        world.transport.pulses.facts["rank", rank] = {"pid": 100 + rank, "started": "earlier"}


def test_the_rank_that_an_agent_reports_as_dead_is_named(world, exits):
    set_facts(world, 0)
    estimate = {
        "device": "cpu",
        "bytes": 3 << 30,
        "within_percent": 20,
        "call": "actor_train",
        "phase": "update",
    }
    (world._logs.parent / "memory.json").write_text(json.dumps(estimate))
    set_facts(world, 1, rank=3, exit=-9, out_of_memory=True, memory=5 << 30)
    exits[1] = 7
    assert world.deaths() == [Death("ranks", 3, 1, -9, True)]
    with pytest.raises(
        WorkerError, match=r"rank 3 was killed by SIGKILL \(out of memory\)"
    ) as raised:
        world._check_alive(LOST_AFTER)
    assert raised.value.where == "node 1, rank 3 pid 103"
    assert "it held 5.00 GiB when last seen" in raised.value.what
    assert (
        "the memory plan has at most 3.00 GiB for it, within 20 % (actor_train, update); with a "
        "smaller train.max_tokens_per_microbatch it needs less" in raised.value.what
    )


@pytest.mark.parametrize(
    ("code", "out_of_memory", "estimate", "expected"),
    [
        (-15, None, {}, ""),
        (-9, False, {}, ""),
        (-9, None, {}, "; it held 1.00 GiB when last seen"),
        (
            -9,
            True,
            {"device": "cuda", "bytes": 1, "within_percent": 5},
            "; the memory plan covers device memory, not host memory",
        ),
        (-9, True, {"bytes": "much"}, "; it held 1.00 GiB when last seen"),
    ],
)
def test_a_kill_is_explained_by_memory_only_where_that_is_likely(
    tmp_path, code, out_of_memory, estimate, expected
):
    (tmp_path / "memory.json").write_text(json.dumps(estimate))
    explanation = explain_kill(code, out_of_memory, 1 << 30, tmp_path)
    assert expected in explanation
    assert bool(explanation) == bool(expected)


def test_all_ranks_of_an_agent_die_with_it(world, exits):
    set_facts(world, 1)
    assert world.deaths() == []
    exits[1] = -9
    assert world.deaths() == [Death("ranks", 2, 1, -9), Death("ranks", 3, 1, -9)]
    with pytest.raises(
        WorkerError, match="node 1: the node is lost, and with it ranks 2-3: its agent was killed"
    ):
        world._check_alive(LOST_AFTER)


def test_an_agent_that_cannot_run_its_ranks_says_why(world):
    set_facts(world, 1, failure="RuntimeError: no room")
    with pytest.raises(WorkerError, match=r"node 1: the node is lost.*RuntimeError: no room"):
        world._check_alive(LOST_AFTER)


def test_a_rank_that_exited_with_0_too_early_is_named(world, monkeypatch):
    monkeypatch.setattr("rlcli.launch.world.REPORT_WITHIN", 0.1)
    set_facts(world, 1, gone=[102, 999])
    with pytest.raises(WorkerError, match="rank 2 ended with exit code 0 before the run was over"):
        world._check_alive(LOST_AFTER)
    world.transport.has_let_go = True
    world._check_alive(LOST_AFTER)


def test_a_silent_agent_is_lost(world):
    set_facts(world, 1)
    now = world.transport._listening_since
    world.transport.pulses.heard["node", 1] = now
    world._check_alive(LOST_AFTER)
    world.transport._listening_since = world.transport.pulses.heard["node", 1] = now - 16
    with pytest.raises(
        WorkerError, match=r"node 1: the node is lost.*has not been heard from for 1\d s"
    ):
        world._check_alive(LOST_AFTER)
    set_facts(world, 1, is_over=True)
    world._check_alive(LOST_AFTER)


def test_a_lost_node_is_named_by_its_machine_and_its_number(world, exits):
    exits[1] = -9
    set_facts(world, 1, host="gpu-17")
    with pytest.raises(
        WorkerError, match=r"gpu-17 \(node 1 of the run\): the node is lost, and with it ranks 2-3"
    ):
        world._check_alive(LOST_AFTER)
    set_facts(world, 1, host="gpu-17", rank=3, exit=-11)
    with pytest.raises(
        WorkerError, match=r"gpu-17 \(node 1 of the run\), rank 3 pid 103: rank 3 was killed"
    ):
        world._check_alive(LOST_AFTER)


def test_a_missing_node_has_the_name_of_the_scheduler(tmp_path):
    (tmp_path / "logs").mkdir()
    world = World(
        recipe(),
        RANKS,
        tmp_path,
        tmp_path / "own",
        lambda node: None,
        {0: "gpu-16", 1: "gpu-17"}.get,
    )
    try:
        set_facts(world, 0, host="localhost")
        with pytest.raises(
            HangError, match=r"gpu-17 \(node 1 of the run\): the node has not joined"
        ):
            world.wait()
        assert world.name_of(0) == "gpu-16 (node 0 of the run)"
    finally:
        world.close()


def test_each_restart_is_reported_once_when_all_ranks_are_up(world):
    reports = []
    world.transport.on_report = reports.append
    set_facts(world, 1, host="gpu-17", restarts=[["reward-pool", 1, "was killed by SIGKILL"]])
    world._check_alive(LOST_AFTER)
    assert reports == []
    set_facts(world, 0)
    let_ranks_come(world)
    world.wait()
    for _ in range(2):
        world._check_alive(LOST_AFTER)
    (report,) = reports
    assert report.name == RESTARTED
    assert report.value == {
        "group": "reward-pool",
        "name": "reward-pool1",
        "machine": "gpu-17 (node 1 of the run)",
        "how": "was killed by SIGKILL",
    }
    set_facts(
        world,
        1,
        restarts=[["reward-pool", 1, "was killed by SIGKILL"], ["a-server", 0, "did not answer"]],
    )
    world._check_alive(LOST_AFTER)
    assert [one.value["name"] for one in reports] == ["reward-pool1", "a-server0"]


def test_processes_are_recorded_once_all_agents_are_heard_from(world):
    """An agent whose first heartbeat comes after its ranks are up is no less part of the run."""
    let_ranks_come(world)
    set_facts(world, 0)
    late = threading.Timer(0.2, set_facts, (world, 1))
    late.start()
    world.wait()
    names = [record.name for record in world.records()]
    late.join()
    assert names == ["node0", "node1", "rank0", "rank1", "rank2", "rank3"]


def test_an_agent_that_is_never_heard_from_is_named(world):
    let_ranks_come(world)
    set_facts(world, 0)
    with pytest.raises(HangError, match="node 1: the node has not joined within 0 s"):
        world.wait()


def test_a_silent_agent_is_lost_on_a_single_node_too(tmp_path, exits):
    (tmp_path / "logs").mkdir()
    (tmp_path / "own").mkdir()
    alone = recipe()
    alone.cluster.nodes = 1
    world = World(alone, Group("ranks", "ranks", (0, 0)), tmp_path, tmp_path / "own", exits.get)
    now = world.transport._listening_since
    world.transport._listening_since = world.transport.pulses.heard["node", 0] = now - 16
    with pytest.raises(
        WorkerError, match=r"the node is lost.*its agent has not been heard from for 1\d s"
    ):
        world._check_alive(LOST_AFTER)
    world.close()


def test_a_node_that_allows_too_few_open_files_is_named_with_the_number_needed(world):
    set_facts(world, 0, host="near", open_files=20_000)
    world._check_alive(LOST_AFTER)
    set_facts(world, 1, host="far", open_files=64)
    with pytest.raises(
        ResourceError, match=r"a rank on node 1 \(far\) may open 64 files .*needs 104"
    ) as raised:
        world._check_alive(LOST_AFTER)
    assert (raised.value.where, raised.value.code, raised.value.exit_code) == ("node 1", "F61", 6)


def test_a_rank_killed_without_descriptors_left_is_explained(world, tmp_path):
    (tmp_path / "logs/rank3.log").write_text(
        "gloo::EnforceNotMet ... accept: Too many open files\nAborted\n"
    )
    set_facts(world, 1, rank=3, exit=-6)
    with pytest.raises(
        WorkerError, match=r"rank 3 was killed by SIGABRT: it had no descriptors left"
    ) as raised:
        world._check_alive(LOST_AFTER)
    assert "another program may have connected to its ports on lo" in raised.value.hint


def test_the_last_lines_of_a_dead_ranks_log_are_shown(world, tmp_path):
    (tmp_path / "logs/rank3.log").write_text("loading\nSegmentation fault\n")
    set_facts(world, 1, rank=3, exit=-11)
    with pytest.raises(
        WorkerError, match=r"last lines of rank3\.log:\n.*loading\n.*Segmentation fault"
    ):
        world._check_alive(LOST_AFTER)


def test_of_a_log_of_any_size_only_the_end_is_read(world, tmp_path):
    size = 64 << 20
    (tmp_path / "logs/rank3.log").write_bytes(b"-" * size + b"\nstep 1\rstep 2\nKilled\n")
    set_facts(world, 1, rank=3, exit=-9, out_of_memory=True)
    tracemalloc.start()
    try:
        with pytest.raises(WorkerError, match=r"\n  step 1\n  step 2\n  Killed"):
            world._check_alive(LOST_AFTER)
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()


def test_a_node_that_does_not_come_is_named_with_its_command(world):
    set_facts(world, 0)
    with pytest.raises(HangError, match="node 1: the node has not joined within 0 s") as raised:
        world.wait()
    assert "rlcli.launch.node" in raised.value.hint


def test_a_job_on_several_nodes_without_an_ipv4_address_is_refused(tmp_path, monkeypatch):
    """Through the loopback, which was taken then, no node reaches another one."""
    only = [SimpleNamespace(family=socket.AF_INET6, address="fd00::1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth0": only})
    monkeypatch.setattr(interfaces, "ROUTES", tmp_path / "none")
    job = recipe(None)
    job.launch.type = "slurm"
    with pytest.raises(ResourceError, match="no network interface here but lo has") as raised:
        World(job, RANKS, tmp_path, None, lambda node: None)
    assert raised.value.code == "F58"
    assert not (tmp_path / "meeting").exists()


def test_a_missing_network_interface_is_refused(tmp_path):
    with pytest.raises(ResourceError, match="there is no network interface 'nonesuch'") as raised:
        World(recipe("nonesuch"), RANKS, tmp_path, tmp_path, lambda node: None)
    assert "lo" in raised.value.hint
    assert not (tmp_path / "meeting").exists()
