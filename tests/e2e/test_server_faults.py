"""Runs whose servers or their network fail: each continues with the same samples and metrics, or
ends within its deadlines and names the culprit. `docs/servers.md` has a table of these faults."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fake_server import HashModel
from fake_server_path import fake_python_path
from fake_sglang import FakeSGLang
from tcp_proxy import TcpProxy
from warm_command import ENVIRONMENT

from rlcli.datasets.arithmetic import Arithmetic

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(420)]

HOME = Path(__file__).resolve().parents[2]
FAULT_AT = 20
"""The fault occurs at this answer, of the 64 of two steps; the weights change after 32."""
BRIEFLY = 1.0
DEADLINE = 4.0
"""Seconds for a response, and for a server to be ready, for lasting faults."""
ROLLOUT = "actor_rollout"


class Servers:
    """Fakes, each behind a proxy, and one fault in the middle of a run."""

    def __init__(self, stack, count=1):
        size = len(Arithmetic.make_tokenizer())
        self.fakes = [stack.enter_context(FakeSGLang(HashModel(size))) for _ in range(count)]
        self.proxies = [
            stack.enter_context(TcpProxy(fake.url.removeprefix("http://"))) for fake in self.fakes
        ]
        self.urls = [f"http://{proxy.address}" for proxy in self.proxies]
        self.failed_at = None
        self._answers = 0
        self._lock = threading.Lock()

    def fail(self, act, at=FAULT_AT):
        """Call `act` once, before an answer leaves a server."""

        def spoil(answer):
            with self._lock:
                self._answers += 1
                is_now = self._answers == at
            if is_now:
                self.failed_at = time.monotonic()
                act()
            return answer

        for fake in self.fakes:
            fake.spoil = spoil

    def asked(self):
        return sum(fake.count("/generate") for fake in self.fakes)


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        yield lambda count=1: Servers(stack, count)


@pytest.fixture(scope="module")
def train_with(train_into, tiny_ppo):
    """Train the tiny recipe into a folder, with servers that these arguments of the backend
    describe."""

    def run(home, steps=2, **args):
        quick = {
            "update": "disk",
            "request_deadline_s": 20.0,
            "update_deadline_s": 20.0,
            "start_deadline_s": 20.0,
        }
        backend = json.dumps({"type": "sglang", "args": {**quick, **args}})
        settings = (
            *tiny_ppo[:-1],
            f"train.steps={steps}",
            f"models.actor.rollout.backend={backend}",
        )
        return train_into(home, "ppo_math", *settings)

    return run


@pytest.fixture(scope="module")
def faultless(tmp_path_factory, train_with):
    """A run without faults."""
    with contextlib.ExitStack() as stack:
        servers = Servers(stack)
        run = train_with(tmp_path_factory.mktemp("faultless"), urls=servers.urls)
        assert run.code == 0, run.err
        return run


def numbers(run):
    """The metrics of each step that do not depend on the clock or on faults."""
    return [dict(filter(is_of_training, record.items())) for record in run.records]


def is_of_training(metric):
    """Whether a (name, number) is none of a machine."""
    name, _ = metric
    of_machines = ("time", "tokens_per_second", "perf/", "memory", "restarts/")
    return not name.startswith(of_machines) and "/servers/" not in name


def ledger(run):
    lines = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    assert all(line["state"] == "trained" for line in lines)
    assert len({line["sample"] for line in lines}) == len(lines), "a sample was trained twice"
    return sorted((line["step"], line["sample"]) for line in lines)


def assert_same_results(run, faultless):
    """The run has the samples, responses and metrics of the one without faults."""
    assert run.code == 0, run.err
    assert ledger(run) == ledger(faultless)
    assert len(ledger(run)) == 16
    assert numbers(run) == numbers(faultless)
    assert (run.folder / "samples.jsonl").read_bytes() == (
        faultless.folder / "samples.jsonl"
    ).read_bytes()


def test_the_time_of_an_update_includes_that_of_the_server(servers, train_with, tmp_path):
    class SlowModel(HashModel):
        def load(self, folder):
            super().load(folder)
            time.sleep(2.0)

    server = servers()
    server.fakes[0].model = SlowModel(server.fakes[0].model.vocabulary)
    run = train_with(tmp_path, urls=server.urls)
    assert run.code == 0, run.err
    assert all(2.0 <= step["time/actor_train.copy_to"] < step["time/step"] for step in run.steps)


def temporarily(act, then):
    """A function that calls `act`, and `then` a second later."""

    def both():
        act()
        threading.Timer(BRIEFLY, then).start()

    return both


def stall(proxy, is_stalled):
    proxy.is_stalled = is_stalled


def cut(proxy, length):
    proxy.breaks_within = length


PASSING = {
    "all connections are reset": lambda proxy: proxy.reset,
    "answers are cut off on the way": lambda proxy: temporarily(
        lambda: cut(proxy, 300), lambda: cut(proxy, None)
    ),
    "nothing is read or forwarded for a while": lambda proxy: temporarily(
        lambda: stall(proxy, True), lambda: stall(proxy, False)
    ),
    "connections are refused for a while": lambda proxy: temporarily(proxy.refuse, proxy.listen),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_does_not_change_results(train_with, servers, tmp_path, faultless, fault):
    setup = servers()
    setup.fail(PASSING[fault](setup.proxies[0]))
    run = train_with(tmp_path, urls=setup.urls)
    assert setup.failed_at is not None
    assert_same_results(run, faultless)
    if "nothing is read" not in fault:
        assert setup.asked() > 64 + 3, "nothing was asked again"


def test_a_slow_network_does_not_change_results(train_with, servers, tmp_path, faultless):
    setup = servers()
    setup.proxies[0].delay = 0.25
    assert_same_results(train_with(tmp_path, urls=setup.urls), faultless)


LASTING = {
    "connections are refused": (
        lambda setup: setup.proxies[0].refuse,
        7,
        "F91",
        "was not ready within 4 s",
    ),
    "nothing is read or forwarded": (
        lambda setup: lambda: stall(setup.proxies[0], True),
        7,
        "F91",
        "was not ready within",
    ),
    "half of each connection is gone": (
        lambda setup: setup.proxies[0].forget,
        8,
        "F91",
        "is alive, but gave no answer",
    ),
    "all arrives later than it may": (
        lambda setup: lambda: setattr(setup.proxies[0], "delay", 10.0),
        7,
        "F91",
        "was not ready within",
    ),
    "answers are garbage": (
        lambda setup: lambda: setup.fakes[0].fail("/generate", *["garbage"] * 99),
        7,
        "F90",
        "JSON",
    ),
    "one of two does not take an update": (
        lambda setup: lambda: setup.fakes[0].fail("/update_weights_from_disk", "refuse", "refuse"),
        7,
        "F92",
        "did not take the weights",
    ),
}


@pytest.mark.parametrize("fault", LASTING)
def test_a_lasting_fault_ends_the_run_in_time_and_is_named(train_with, servers, tmp_path, fault):
    act, code, id_, message = LASTING[fault]
    setup = servers(2 if "one of two" in fault else 1)
    setup.fail(act(setup))
    run = train_with(
        tmp_path, urls=setup.urls, request_deadline_s=DEADLINE, start_deadline_s=DEADLINE
    )
    assert setup.failed_at is not None
    assert time.monotonic() - setup.failed_at < 12 * DEADLINE
    assert run.code == code == run.status["exit_code"], run.err
    assert f"error[{id_}]" in run.err
    assert message in run.err
    assert [url for url in setup.urls if url in run.err] == setup.urls[:1]
    assert {step for step, _ in ledger(run)} <= {1}


# -- servers of the run ----------------------------------------------------------------------------


@pytest.fixture
def python_path(tmp_path):
    """A PYTHONPATH with which `python -m sglang.launch_server` starts the fake."""
    return fake_python_path(tmp_path)


@pytest.fixture
def in_background():
    """Calls a function repeatedly until the test has ended or it returns a true value."""
    ended, threads = threading.Event(), []

    def start(act):
        def work():
            while not ended.wait(0.1) and not act():
                pass

        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield start
    ended.set()
    for thread in threads:
        thread.join()


def processes(*words):
    """The processes of this machine whose command lines contain all of these words."""
    matches = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if set(words) <= set(process.cmdline()):
                matches.append(process)
    return matches


def kill_processes(*words):
    """Kill `processes`, some of which may end when others do, and return them."""
    running = processes(*words)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return running


def test_a_killed_server_of_the_run_is_restarted(
    train_with, tmp_path, faultless, python_path, in_background
):
    folder, killed = tmp_path / "run" / "servers" / f"{ROLLOUT}-server0", []

    def kill():
        if (folder / "serves.json").exists() and not (folder / "settings.yaml").exists():
            time.sleep(0.5)
            killed.extend(kill_processes("sglang.launch_server", str(folder / "settings.yaml")))
        return killed

    in_background(kill)
    run = train_with(
        tmp_path,
        python=sys.executable,
        environment={"PYTHONPATH": python_path},
        options={"token_s": 0.2},
    )
    assert len(killed) == 2  # the server and its guardian
    assert_same_results(run, faultless)
    assert sum(record.get(f"restarts/{ROLLOUT}-server", 0) for record in run.records) == 1
    warned = rf"warning: {ROLLOUT}-server0 on \S+ was killed by SIGKILL.*; it was started again"
    assert len(re.findall(warned, run.err)) == 1, run.err
    assert not processes(str(folder))
    assert not (folder / "settings.yaml").exists()


def test_a_server_over_two_nodes_is_replaced_as_one(
    command, tmp_path, tiny_ppo, faultless, python_path, in_background
):
    """The process on the second node is killed, which the first one does not notice."""
    slots = [tmp_path / "run" / "servers" / f"{ROLLOUT}-server{number}" for number in (0, 1)]
    killed = []

    def kill():
        if (slots[1] / "serves.json").exists() and not (slots[1] / "settings.yaml").exists():
            time.sleep(0.5)
            killed.extend(kill_processes("sglang.launch_server", str(slots[1] / "settings.yaml")))
        return killed

    in_background(kill)
    args = {
        "python": sys.executable,
        "nodes": 2,
        "tp": 2,
        "weights_folder": str(tmp_path),
        "update": "disk",
        "environment": {"PYTHONPATH": python_path},
        "options": {"token_s": 0.2},
    }
    rollout = {"devices": "0", "backend": {"type": "sglang", "args": args}}
    nodes = (
        "launch=local",
        "cluster.nodes=2",
        f"models.actor.rollout={json.dumps(rollout)}",
        "--run-dir",
        "run",
    )
    finished = command("train", "ppo_math", *tiny_ppo, *nodes, cwd=tmp_path)
    assert len(killed) == 2  # it and its guardian
    assert finished.returncode == 0, finished.stderr
    assert ledger(SimpleNamespace(folder=tmp_path / "run")) == ledger(faultless)
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum(record.get(f"restarts/{ROLLOUT}-server", 0) for record in records) == 1
    warned = (
        rf"warning: {ROLLOUT}-server0 on .+ \(node 0 of the run\) ended with {ROLLOUT}-server1, "
        "which was killed by SIGKILL.*; it was started again"
    )
    assert len(re.findall(warned, finished.stderr)) == 1, finished.stderr
    assert not [process for slot in slots for process in processes(str(slot))]


def test_a_server_whose_agent_keeps_being_killed_ends_the_run_at_once(
    train_with, tmp_path, python_path, in_background
):
    folder, killed = tmp_path / "run" / "servers" / f"{ROLLOUT}-server0", []

    def kill():
        # These include a fork of it that has not started another program yet.
        has_begun = (tmp_path / "run" / "metrics.jsonl").exists()
        if has_begun and kill_processes("rlcli.launch.server", str(folder)):
            killed.append(time.monotonic())

    in_background(kill)
    run = train_with(
        tmp_path,
        100_000,
        python=sys.executable,
        environment={"PYTHONPATH": python_path},
        start_deadline_s=300.0,
    )
    assert 2 <= len(killed) <= 4
    assert time.monotonic() - killed[-1] < 30
    assert run.code == 7, run.err
    assert f"{ROLLOUT}-server0" in run.err
    ends = (
        "was killed by SIGKILL (out of memory?), 4 times",
        # if it is killed while it restarts
        "ended before it was ready",
        "did not take the weights after that",
    )
    assert any(end in run.err for end in ends), run.err


def test_a_killed_node_is_named_and_its_servers_end(tmp_path, tiny_ppo, python_path):
    backend = {
        "type": "sglang",
        "args": {
            "python": sys.executable,
            "update": "disk",
            "environment": {"PYTHONPATH": python_path},
        },
    }
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rlcli",
            "train",
            "ppo_math",
            *tiny_ppo[:-1],
            "train.steps=100000",
            "launch=local",
            "cluster.nodes=2",
            f"models.actor.rollout={json.dumps({'devices': '1', 'backend': backend})}",
            "--run-dir",
            "run",
        ],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
            assert run.poll() is None, run.communicate()
            time.sleep(0.1)
        records = json.loads((tmp_path / "run" / "procs.json").read_text())
        node = next(
            psutil.Process(record["pid"]) for record in records if record["name"] == "node1"
        )
        (server,) = [
            one
            for one in processes("sglang.launch_server")
            if str(tmp_path) in " ".join(one.cmdline())
        ][1:]
        node.kill()
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 7, errors
    assert "(node 1 of the run): the node is lost" in errors
    _, alive = psutil.wait_procs([server], 5)
    assert alive == []
