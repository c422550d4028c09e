"""Runs whose servers fail, or the network in front of them: each continues with the same samples and numbers, or ends
within its deadlines and names the culprit. `docs/servers.md` has these faults as a table."""

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
from fake_sglang_path import path_of_the_fake
from warm_command import ENVIRONMENT

from rlcli.datasets.arithmetic import Arithmetic
from rlcli.testing.fake_sglang import FakeSGLang, HashModel
from rlcli.testing.tcp_proxy import TcpProxy

pytestmark = pytest.mark.timeout(420)

HOME = Path(__file__).resolve().parents[2]
FAULT_AT = 20
"""The fault comes with this answer, of 64 that two steps take; the weights change after 32."""
BRIEFLY = 1.0
DEADLINE = 4.0
"""Seconds for a response, and for a server to be ready, where a fault stays."""
ROLLOUT = "actor_rollout"


class Servers:
    """Fakes, each behind a proxy, and one fault that comes in the middle of a run."""

    def __init__(self, stack, count=1):
        size = len(Arithmetic.make_tokenizer())
        self.fakes = [stack.enter_context(FakeSGLang(HashModel(size))) for _ in range(count)]
        self.proxies = [stack.enter_context(TcpProxy(fake.url.removeprefix("http://"))) for fake in self.fakes]
        self.urls = [f"http://{proxy.address}" for proxy in self.proxies]
        self.failed_at = None
        self._answers = 0
        self._lock = threading.Lock()

    def fail(self, act, at=FAULT_AT):
        """Do that before an answer leaves a server, once."""

        def spoil(made):
            with self._lock:
                self._answers += 1
                is_now = self._answers == at
            if is_now:
                self.failed_at = time.monotonic()
                act()
            return made

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
    """Train the tiny recipe into a folder, with servers that these arguments of the backend describe."""

    def run(home, steps=2, **args):
        quick = {"update": "disk", "request_deadline_s": 20.0, "update_deadline_s": 20.0, "start_deadline_s": 20.0}
        backend = json.dumps({"type": "sglang", "args": {**quick, **args}})
        settings = (*tiny_ppo[:-1], f"train.steps={steps}", f"models.actor.rollout.backend={backend}")
        return train_into(home, "ppo_math", *settings)

    return run


@pytest.fixture(scope="module")
def faultless(tmp_path_factory, train_with):
    """What a run does without a fault."""
    with contextlib.ExitStack() as stack:
        servers = Servers(stack)
        run = train_with(tmp_path_factory.mktemp("faultless"), urls=servers.urls)
        assert run.code == 0, run.err
        return run


def numbers(run):
    """Of each step, without what depends on the clock or on a fault."""
    other = ("time", "tokens_per_second", "memory", "restarts/")
    return [{key: value for key, value in record.items() if not key.startswith(other)} for record in run.records]


def ledger(run):
    lines = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    assert all(line["state"] == "trained" for line in lines)
    assert len({line["sample"] for line in lines}) == len(lines), "a sample was trained twice"
    return sorted((line["step"], line["sample"]) for line in lines)


def assert_the_same(run, faultless):
    """It has continued with the samples, the responses and the numbers of the other."""
    assert run.code == 0, run.err
    assert ledger(run) == ledger(faultless)
    assert len(ledger(run)) == 16
    assert numbers(run) == numbers(faultless)
    assert (run.folder / "samples.jsonl").read_bytes() == (faultless.folder / "samples.jsonl").read_bytes()


def test_the_time_of_an_update_is_that_of_the_server(servers, train_with, tmp_path):
    class SlowModel(HashModel):
        def load(self, folder):
            super().load(folder)
            time.sleep(2.0)

    server = servers()
    server.fakes[0].model = SlowModel(server.fakes[0].model.vocabulary)
    run = train_with(tmp_path, urls=server.urls)
    assert run.code == 0, run.err
    assert all(2.0 <= step["time/actor_train.copy_to"] < step["time/step"] for step in run.steps)


def briefly(act, then):
    """Do one thing, and a second later another."""

    def both():
        act()
        threading.Timer(BRIEFLY, then).start()

    return both


def stall(proxy, whether):
    proxy.is_stalled = whether


def cut(proxy, length):
    proxy.breaks_within = length


PASSING = {
    "all connections are reset": lambda proxy: proxy.reset,
    "answers are cut off on the way": lambda proxy: briefly(lambda: cut(proxy, 300), lambda: cut(proxy, None)),
    "nothing is read or forwarded for a while": lambda proxy: briefly(
        lambda: stall(proxy, True), lambda: stall(proxy, False)
    ),
    "connections are refused for a while": lambda proxy: briefly(proxy.refuse, proxy.listen),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_changes_nothing(train_with, servers, tmp_path, faultless, fault):
    own = servers()
    own.fail(PASSING[fault](own.proxies[0]))
    run = train_with(tmp_path, urls=own.urls)
    assert own.failed_at is not None
    assert_the_same(run, faultless)
    if "nothing is read" not in fault:
        assert own.asked() > 64 + 3, "nothing was asked again"


def test_a_slow_network_makes_a_run_slow_and_no_more(train_with, servers, tmp_path, faultless):
    own = servers()
    own.proxies[0].delay = 0.25
    assert_the_same(train_with(tmp_path, urls=own.urls), faultless)


LASTING = {
    "connections are refused": (lambda own: own.proxies[0].refuse, 7, "F91", "was not ready within 4 s"),
    "nothing is read or forwarded": (lambda own: lambda: stall(own.proxies[0], True), 7, "F91", "was not ready within"),
    "half of each connection is gone": (lambda own: own.proxies[0].forget, 8, "F91", "lives, but gave no answer"),
    "all arrives later than it may": (
        lambda own: lambda: setattr(own.proxies[0], "delay", 10.0), 7, "F91", "was not ready within",
    ),
    "answers are garbage": (lambda own: lambda: own.fakes[0].fail("/generate", *["garbage"] * 99), 7, "F90", "JSON"),
    "one of two does not take an update": (
        lambda own: lambda: own.fakes[0].fail("/update_weights_from_disk", "refuse", "refuse"), 7, "F92",
        "did not take the weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_stays_ends_the_run_within_its_deadlines_and_is_named(train_with, servers, tmp_path, fault):
    act, code, id_, said = LASTING[fault]
    own = servers(2 if "one of two" in fault else 1)
    own.fail(act(own))
    run = train_with(tmp_path, urls=own.urls, request_deadline_s=DEADLINE, start_deadline_s=DEADLINE)
    assert own.failed_at is not None
    assert time.monotonic() - own.failed_at < 12 * DEADLINE
    assert run.code == code == run.status["exit_code"], run.err
    assert f"error[{id_}]" in run.err
    assert said in run.err
    assert [url for url in own.urls if url in run.err] == own.urls[:1]
    assert {step for step, _ in ledger(run)} <= {1}


# -- servers of the run ----------------------------------------------------------------------------------------------


@pytest.fixture
def python_path(tmp_path):
    """What makes `python -m sglang.launch_server` start the fake."""
    return path_of_the_fake(tmp_path)


@pytest.fixture
def in_background():
    """Call this again and again until the test has ended, or it returns something."""
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
    """Those of this machine whose command lines have all of these words."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if set(words) <= set(process.cmdline()):
                found.append(process)
    return found


def test_a_server_of_the_run_that_is_killed_is_replaced(train_with, tmp_path, faultless, python_path, in_background):
    folder, killed = tmp_path / "run" / "servers" / f"{ROLLOUT}-server0", []

    def kill():
        if (folder / "serves.json").exists() and not (folder / "settings.yaml").exists():
            time.sleep(0.5)
            killed.extend(processes("sglang.launch_server", str(folder / "settings.yaml")))
            for one in killed:
                one.kill()
        return killed

    in_background(kill)
    run = train_with(tmp_path, python=sys.executable, environment={"PYTHONPATH": python_path}, options={"token_s": 0.2})
    assert len(killed) == 2  # it and its guardian
    assert_the_same(run, faultless)
    assert sum(record.get(f"restarts/{ROLLOUT}-server", 0) for record in run.records) == 1
    warned = rf"warning: {ROLLOUT}-server0 on \S+ was killed by SIGKILL.*; it was started again"
    assert len(re.findall(warned, run.err)) == 1, run.err
    assert not processes(str(folder))
    assert not (folder / "settings.yaml").exists()


def test_a_server_over_two_nodes_is_replaced_as_one(command, tmp_path, tiny_ppo, faultless, python_path, in_background):
    """The process on the second node is killed, which the first one does not notice."""
    slots = [tmp_path / "run" / "servers" / f"{ROLLOUT}-server{number}" for number in (0, 1)]
    killed = []

    def kill():
        if (slots[1] / "serves.json").exists() and not (slots[1] / "settings.yaml").exists():
            time.sleep(0.5)
            killed.extend(processes("sglang.launch_server", str(slots[1] / "settings.yaml")))
            for process in killed:
                process.kill()
        return killed

    in_background(kill)
    args = {
        "python": sys.executable, "nodes": 2, "tp": 2, "weights_folder": str(tmp_path), "update": "disk",
        "environment": {"PYTHONPATH": python_path}, "options": {"token_s": 0.2},
    }  # fmt: skip
    rollout = {"devices": "0", "backend": {"type": "sglang", "args": args}}
    nodes = ("launch=local", "cluster.nodes=2", f"models.actor.rollout={json.dumps(rollout)}", "--run-dir", "run")
    finished = command("train", "ppo_math", *tiny_ppo, *nodes, cwd=tmp_path)
    assert len(killed) == 2  # it and its guardian
    assert finished.returncode == 0, finished.stderr
    assert ledger(SimpleNamespace(folder=tmp_path / "run")) == ledger(faultless)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(record.get(f"restarts/{ROLLOUT}-server", 0) for record in records) == 1
    warned = (
        rf"warning: {ROLLOUT}-server0 on .+ \(node 0 of the run\) ended with {ROLLOUT}-server1, "
        "which was killed by SIGKILL.*; it was started again"
    )
    assert len(re.findall(warned, finished.stderr)) == 1, finished.stderr
    assert not [process for slot in slots for process in processes(str(slot))]


def test_a_server_that_nobody_can_run_any_more_ends_the_run_at_once(train_with, tmp_path, python_path, in_background):
    folder, killed = tmp_path / "run" / "servers" / f"{ROLLOUT}-server0", []

    def kill():
        if (tmp_path / "run" / "metrics.jsonl").exists():
            found = processes("rlcli.launch.server", str(folder))  # a fork of it that has become nothing else yet, too
            for one in found:
                one.kill()
            if found:
                killed.append(time.monotonic())

    in_background(kill)
    run = train_with(
        tmp_path, 100_000, python=sys.executable, environment={"PYTHONPATH": python_path}, start_deadline_s=300.0,
    )  # fmt: skip
    assert 2 <= len(killed) <= 4
    assert time.monotonic() - killed[-1] < 30
    assert run.code == 7, run.err
    assert f"{ROLLOUT}-server0" in run.err
    ends = (
        "was killed by SIGKILL (out of memory?), 4 times",
        "ended before it was ready", "did not take the weights after that",  # if a kill meets it while it comes back
    )  # fmt: skip
    assert any(end in run.err for end in ends), run.err


def test_a_node_that_is_killed_takes_its_servers_along_and_is_named(tmp_path, tiny_ppo, python_path):
    backend = {
        "type": "sglang",
        "args": {"python": sys.executable, "update": "disk", "environment": {"PYTHONPATH": python_path}},
    }
    run = subprocess.Popen(
        [
            sys.executable, "-m", "rlcli", "train", "ppo_math", *tiny_ppo[:-1], "train.steps=100000", "launch=local",
            "cluster.nodes=2", f"models.actor.rollout={json.dumps({'devices': '1', 'backend': backend})}",
            "--run-dir", "run",
        ],
        cwd=tmp_path, env={**os.environ, **ENVIRONMENT}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
            assert run.poll() is None, run.communicate()
            time.sleep(0.1)
        records = json.loads((tmp_path / "run" / "procs.json").read_text())
        node = next(psutil.Process(record["pid"]) for record in records if record["name"] == "node1")
        (server,) = [one for one in processes("sglang.launch_server") if str(tmp_path) in " ".join(one.cmdline())][1:]
        node.kill()
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 7, errors
    assert "(node 1 of the run): the node is lost" in errors
    _, alive = psutil.wait_procs([server], 5)
    assert alive == []
