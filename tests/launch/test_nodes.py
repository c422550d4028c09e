"""A run on two "nodes" of this machine: agents, folders and connections as between machines,
and real processes, which are forks where nothing is tested about their start."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from run_files import numbers
from tcp_proxy import TcpProxy

from rlcli.launch.node import FAILED, LOST
from rlcli.launch.run import run_recipe
from rlcli.messaging.control import CONTROL_FILE, Control
from rlcli.messaging.pulse import LOST_AFTER
from rlcli.observe.display import PlainDisplay
from rlcli.processes import die_with_parent
from rlcli.recipe.resolve import load_recipe

pytestmark = pytest.mark.timeout(900)  # each start takes a while on a slow machine

HOME = str(Path(__file__).parents[2])
TWO_NODES = ("launch=local", "cluster.nodes=2")
GONE_WITHIN = 5.0


def wait_for(condition, seconds=400):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


class Run:
    """`rlcli train` in a process of its own, and all processes of that run."""

    def __init__(self, project, *overrides, is_fork=True):
        self.folder = project / "run"
        command = (sys.executable, "-m", "rlcli", "train", "toy.yaml", "--run-dir", "run")
        self.process = subprocess.Popen(
            [*(() if is_fork else ("env",)), *command, *overrides],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": HOME},
            preexec_fn=die_with_parent,
        )

    def is_training(self):
        assert self.process.poll() is None, self.process.stderr.read()
        file = self.folder / "metrics.jsonl"
        return (
            (self.folder / "procs.json").exists()
            and file.exists()
            and len(file.read_text().splitlines()) > 2
        )

    def processes(self):
        """Name → process, by the run's own record."""
        records = json.loads((self.folder / "procs.json").read_text())
        return {record["name"]: psutil.Process(record["pid"]) for record in records}

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def start(project, forked_processes):
    runs = []

    def begin(*overrides, **options):
        runs.append(Run(project, *TWO_NODES, *overrides, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.communicate()


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def assert_gone(family):
    """Nothing of it is left a few seconds later."""
    _, alive = psutil.wait_procs(family, timeout=GONE_WITHIN)
    assert [process for process in alive if is_alive(process)] == []


@pytest.mark.long
def test_two_nodes_give_bit_equal_results_to_one(start, project, quick_ranks):
    """Each also works without the other's temporary folder."""
    with PlainDisplay(sys.stderr) as display:
        recipe = load_recipe(
            "toy.yaml", ["launch=local", "cluster.devices_per_node=2", "train.steps=20"]
        )
        run_recipe(recipe, project / "one", display)
    run = start("train.steps=20", "toy.seconds=0.2", is_fork=False)
    wait_for(run.is_training)
    agents = {name: agent for name, agent in run.processes().items() if name.startswith("node")}
    folders = {
        name: (Path(agent.environ()["TMPDIR"]), Path(agent.cwd())) for name, agent in agents.items()
    }
    assert len({*folders["node0"], *folders["node1"]}) == 4
    shutil.rmtree(folders["node1"][0])
    listening = [
        c.laddr.ip
        for p in run.family()
        for c in p.net_connections()
        if c.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}
    _, errors = run.process.communicate(timeout=600)
    assert run.process.returncode == 0, errors
    assert numbers(run.folder) == numbers(project / "one")
    for file in ("samples.jsonl", "models/actor/config.json", "models/critic/config.json"):
        assert (run.folder / file).read_bytes() == (project / "one" / file).read_bytes(), file
    assert not folders["node0"][0].exists()
    assert not (run.folder / "meeting").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "says"),
    [
        (
            "node1",
            (
                r"\[F01\] \S+ \(node 1 of the run\): the node is lost, and with it "
                r"rank 1: its agent was killed"
            ),
        ),
        (
            "rank1",
            r"\[F01\] \S+ \(node 1 of the run\), rank 1 pid \d+: rank 1 was killed by SIGKILL",
        ),
    ],
)
def test_a_killed_process_ends_the_run_on_all_nodes_and_is_named(start, victim, says):
    run = start("train.steps=100000")
    wait_for(run.is_training)
    family, processes = run.family(), run.processes()
    assert {*processes} == {"node0", "node1", "rank0", "rank1"}
    processes[victim].send_signal(signal.SIGKILL)
    _, errors = run.process.communicate(timeout=60)
    assert re.search(says, errors), errors
    assert run.process.returncode == 7
    assert_gone(family)
    assert json.loads((run.folder / "status.json").read_text())["exit_code"] == 7


@pytest.mark.exhaustive
def test_a_stopped_agent_is_named_after_three_missed_heartbeats(start):
    run = start("train.steps=100000")
    wait_for(run.is_training)
    family, processes = run.family(), run.processes()
    processes["node1"].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    _, errors = run.process.communicate(timeout=300)
    assert time.monotonic() - began < LOST_AFTER + 10
    says = (
        r"\[F01\] \S+ \(node 1 of the run\): the node is lost.*its agent has "
        r"not been heard from for \d+ s"
    )
    assert re.search(says, errors), errors
    assert run.process.returncode == 7
    assert_gone(family)


@pytest.mark.exhaustive
def test_no_node_outlives_its_master(start):
    run = start("train.steps=100000")
    wait_for(run.is_training)
    family = run.family()
    (master,) = psutil.Process(run.process.pid).children()
    master.kill()
    assert_gone([one for one in family if one != master])
    run.process.communicate(timeout=60)
    assert run.process.returncode == 7


# -- nodes that are started by hand ----------------------------------------------------------------


class ByHand:
    """A run whose commands are those that `rlcli plan --commands` prints,
    each typed into a shell."""

    def __init__(self, project, *overrides):
        self.folder = project / "by hand"
        self.shells = []
        plan = [
            sys.executable,
            "-m",
            "rlcli",
            "plan",
            "toy.yaml",
            *TWO_NODES,
            *overrides,
            "--commands",
        ]
        printed = subprocess.run(
            [*plan, "--run-dir", str(self.folder)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": HOME},
        ).stdout
        self.commands = [
            line
            for line in printed.replace("\\\n", "").splitlines()
            if line and not line.startswith("#")
        ]

    def type(self, node, folder, **variables):
        """Start a node in a shell of its own, which works in that folder."""
        shell = subprocess.Popen(
            ["bash", "-c", f"exec {self.commands[node]}" if node else self.commands[node]],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": HOME, **variables},
        )
        self.shells.append(shell)
        return shell

    def is_training(self):
        file = self.folder / "metrics.jsonl"
        return file.exists() and len(file.read_text().splitlines()) > 2


@pytest.fixture
def by_hand(project):
    runs = []

    def begin(*overrides):
        runs.append(ByHand(project, *overrides))
        return runs[-1]

    yield begin
    for shell in (shell for run in runs for shell in run.shells):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()


@pytest.fixture
def elsewhere(tmp_path_factory):
    """Where a second machine works."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.mark.exhaustive
def test_the_printed_commands_start_a_run_in_two_shells(by_hand, train, elsewhere):
    run = by_hand()
    assert len(run.commands) == 2
    second = run.type(1, elsewhere)  # whichever comes first
    first = run.type(0, elsewhere)
    assert (first.wait(400), second.wait(60)) == (0, 0), first.communicate() + second.communicate()
    _, folder = train(name="one process")
    assert (run.folder / "samples.jsonl").read_bytes() == (folder / "samples.jsonl").read_bytes()
    records = json.loads((run.folder / "procs.json").read_text())
    assert [(one["name"], one["node"]) for one in records] == [
        ("node0", 0),
        ("node1", 1),
        ("rank0", 0),
        ("rank1", 1),
    ]
    control = run.folder / "meeting" / CONTROL_FILE
    assert not control.exists()


@pytest.mark.exhaustive
def test_a_node_started_after_the_run_was_killed_waits_for_the_run_to_be_resumed(
    by_hand, elsewhere
):
    run = by_hand("train.steps=100000", "checkpoint.every_steps=1")
    first, second = run.type(0, elsewhere), run.type(1, elsewhere)
    wait_for(run.is_training)
    os.killpg(first.pid, signal.SIGKILL)
    second.wait(60)
    done = len((run.folder / "metrics.jsonl").read_text().splitlines())
    assert (run.folder / "meeting" / CONTROL_FILE).exists()
    third = run.type(1, elsewhere)
    assert "the first node does not answer" in third.stderr.readline()
    resume = ["rlcli", "resume", str(run.folder), f"train.steps={done + 3}", "--accept-changes"]
    run.commands[0] = shlex.join([sys.executable, "-m", *resume])
    again = run.type(0, elsewhere)
    assert (again.wait(400), third.wait(60)) == (0, 0), again.communicate() + third.communicate()


@pytest.mark.exhaustive
def test_a_node_that_never_comes_is_named_with_its_command(by_hand, elsewhere):
    run = by_hand("launch.startup_deadline=15")
    first = run.type(0, elsewhere)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 8
    assert "node 1: the node has not joined within 15 s" in errors
    assert f"rlcli.launch.node '{run.folder}' 1" in errors


@pytest.mark.exhaustive
def test_an_interrupt_of_any_node_ends_the_run_after_its_step(by_hand, elsewhere):
    run = by_hand("train.steps=100000")
    first, second = run.type(0, elsewhere), run.type(1, elsewhere)
    wait_for(run.is_training)
    os.kill(second.pid, signal.SIGINT)
    assert (first.wait(120), second.wait(60)) == (130, 0), first.communicate()
    status = json.loads((run.folder / "status.json").read_text())
    committed = json.loads((run.folder / "committed.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", committed["step"])


@pytest.mark.exhaustive
def test_a_node_that_has_lost_its_master_ends_by_itself(by_hand, elsewhere):
    """The master's machine is gone with all that was on it."""
    run = by_hand("train.steps=100000")
    first, second = run.type(0, elsewhere), run.type(1, elsewhere)
    wait_for(run.is_training)
    assert not (run.folder / "meeting" / CONTROL_FILE).stat().st_mode & 0o077
    family = [psutil.Process(second.pid), *psutil.Process(second.pid).children(recursive=True)]
    os.killpg(first.pid, signal.SIGKILL)
    # its rank may notice the death of its peer first
    assert second.wait(LOST_AFTER + GONE_WITHIN) in (FAILED, LOST)
    assert_gone(family)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "stall",
            (
                r"\(node 1 of the run\): the node is lost, and with it rank 1: its agent has "
                r"not been heard from for 1\d s"
            ),
        ),
        ("reset", r"\[F08\] rank 1 pid \d+: the connection between the master and rank 1 was lost"),
    ],
)
def test_a_failing_network_ends_the_run_and_the_node_is_named(by_hand, elsewhere, fault, says):
    run = by_hand("train.steps=100000")
    first = run.type(0, elsewhere)
    wait_for((run.folder / "meeting" / CONTROL_FILE).exists)
    control = Control.read(run.folder / "meeting")
    with (
        TcpProxy(control.requests.removeprefix("tcp://")) as requests,
        TcpProxy(control.pulses.removeprefix("tcp://")) as pulses,
    ):
        through = {"requests": f"tcp://{requests.address}", "pulses": f"tcp://{pulses.address}"}
        replace(control, **through).write(elsewhere)
        second = run.type(1, elsewhere, RLCLI_MEETING=str(elsewhere))
        wait_for(run.is_training)
        family = psutil.Process(second.pid).children(recursive=True)
        began = time.monotonic()
        for proxy in (requests, pulses):
            proxy.is_stalled = fault == "stall"
        if fault == "reset":
            requests.reset()
        _, errors = first.communicate(timeout=60)
        assert re.search(says, errors), errors
        assert time.monotonic() - began < LOST_AFTER + 10
        assert first.returncode == 7
        assert second.wait(LOST_AFTER + GONE_WITHIN) in (FAILED, LOST)
        assert_gone(family)
