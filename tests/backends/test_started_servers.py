"""Servers started by a run: processes that agents start, and restart when they die."""

import os
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from attached_engines import follow
from fake_server_path import fake_python_path
from heard_work import heard_work
from server_kinds import KINDS, SGLANG

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.headway import Count
from rlcli.backends._server_http import Endpoint, ServerRefused
from rlcli.backends._server_process import Launch
from rlcli.errors import WorkerError
from rlcli.launch import children
from rlcli.launch.children import Members, run_environment
from rlcli.launch.launcher import Restart
from rlcli.owned_folder import OwnedFolder
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.generation import generate
from rlcli.testing.tiny_models import TinyTokenizer
from rlcli.topology.groups import Group, process_folder

QUICK = {"start_deadline_s": 20.0, "request_deadline_s": 5.0, "update_deadline_s": 10.0}


@pytest.fixture
def members_of_nodes():
    """The agents of each node."""
    return []


@pytest.fixture(params=KINDS, ids=str)
def kind(request):
    return request.param


only_sglang = pytest.mark.parametrize("kind", [SGLANG], ids=str, indirect=True)


@pytest.fixture
def start_engine(tmp_path, kind, members_of_nodes):
    """Builds an engine whose `count` servers are processes that the backend starts."""
    path = fake_python_path(tmp_path)
    with ExitStack() as stack:

        def make(count=1, **args):
            nodes = tuple(range(args.get("nodes", 1)))
            group = Group("server", "server", nodes * count, processes_of_each=len(nodes))
            for node in nodes:
                members = Members(tmp_path, run_environment(1))
                stack.callback(members.stop)
                members.start([group], node)
                members_of_nodes.append(members)
            checks = BackendContract()
            checks.server_folders = tuple(
                process_folder(tmp_path, "server", group.name, index)
                for index in range(len(group.nodes))
            )
            checks.name, checks.args = (
                kind.name,
                {
                    **QUICK,
                    "python": sys.executable,
                    "servers": count,
                    "update": "disk",
                    "weights_folder": str(tmp_path),
                    "environment": {"PYTHONPATH": path},
                    **args,
                },
            )
            engine = checks.engine("llama")
            stack.callback(engine.close)
            return engine

        yield make


def servers_of(engine):
    return engine._servers.servers


def processes(engine):
    """The processes of each server: the children of its guardian, which is a child of its agent."""
    agents = {
        one.cmdline()[-1]: one
        for one in psutil.Process().children()
        if "rlcli.launch.server" in one.cmdline()
    }
    folders = [[str(slot.folder) for slot in server.launch.slots] for server in servers_of(engine)]
    return [
        [
            process
            for folder in of_server
            for guardian in agents[folder].children()
            for process in guardian.children()
        ]
        for of_server in folders
    ]


def test_the_weights_that_a_killed_rank_left_are_removed_by_the_next_one(start_engine, tmp_path):
    rank = os.fork()
    if not rank:
        folder = OwnedFolder(tmp_path, "actor-")
        (folder.path / "model.safetensors").write_bytes(b"weights")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(rank, 0)
    (abandoned,) = tmp_path.glob("rlcli-*")
    engine = start_engine()
    (current,) = tmp_path.glob("rlcli-*")
    assert current != abandoned
    engine.close()
    assert not list(tmp_path.glob("rlcli-*"))


def test_servers_that_have_started_are_counted(start_engine):
    with heard_work() as heard:
        start_engine(2)
    assert Count(2, 2, "servers") in heard.counts


@pytest.mark.long
def test_a_server_killed_mid_rollout_is_restarted_without_losing_responses(start_engine):
    engine = start_engine(2, options={"token_s": 0.05})
    expected = [one.tolist() for one in generate(engine, responses_per_prompt=4).tokens]
    victim = processes(engine)[0][0]
    killer = threading.Timer(0.3, victim.kill)
    killer.start()
    actual = [one.tolist() for one in generate(engine, responses_per_prompt=4).tokens]
    killer.join()
    assert actual == expected
    assert [server.lives for server in servers_of(engine)] == [2, 1]


def test_a_server_that_has_died_before_a_pause_is_restarted(start_engine):
    engine = start_engine(2)
    before = generate(engine, greedy=True).tokens
    settings = GenerationHyperparameters(max_new_tokens=8)
    with engine.open(TinyTokenizer(), settings, 8) as stream:
        (victim,), _ = processes(engine)
        victim.kill()
        psutil.wait_procs([victim], 20)
        stream.pause()
        follow(engine, seed=7)
        stream.resume()
    after = generate(engine, greedy=True).tokens
    assert [one.tolist() for one in after] != [one.tolist() for one in before]
    assert [server.lives for server in servers_of(engine)] == [2, 1]


def test_a_server_that_has_died_while_its_memory_is_released_is_restarted(start_engine):
    engine = start_engine(2)
    expected = [one.tolist() for one in generate(engine).tokens]
    engine.offload()
    (victim,), _ = processes(engine)
    victim.kill()
    psutil.wait_procs([victim], 20)
    assert [one.tolist() for one in generate(engine).tokens] == expected
    assert [server.lives for server in servers_of(engine)] == [2, 1]


@pytest.mark.long
@only_sglang
@pytest.mark.parametrize("node", [0, 1])
def test_a_server_over_two_nodes_is_restarted_as_one_if_a_process_dies(
    start_engine, members_of_nodes, node
):
    engine = start_engine(nodes=2, tp=2, options={"token_s": 0.2})
    expected = [tokens.tolist() for tokens in generate(engine).tokens]
    (before,) = processes(engine)
    assert len(before) == 2
    guardian = before[node].parent()
    killer = threading.Timer(0.3, guardian.kill)
    killer.start()
    assert [tokens.tolist() for tokens in generate(engine).tokens] == expected
    killer.join()
    assert [server.lives for server in servers_of(engine)] == [2]
    (after,) = processes(engine)
    assert len(after) == 2
    assert {process.pid for process in before}.isdisjoint(process.pid for process in after)
    killed = "was killed by SIGKILL (out of memory?)"
    how = killed if node == 0 else f"ended with server1, which {killed}"
    time.sleep(2 * children.LOOK_SECONDS)
    assert [members.new_restarts() for members in members_of_nodes] == [
        [Restart("server", 0, how)],
        [],
    ]


@only_sglang
def test_the_process_of_a_server_that_ended_first_is_named(start_engine, tmp_path):
    """The first process would wait for it forever."""
    package = tmp_path / "broken" / "sglang"
    package.mkdir(parents=True)
    (package / "launch_server.py").write_text(
        "import sys, time\n"
        "if 'node-rank: 1' in open(sys.argv[2]).read(): raise SystemExit('no such device')\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(
        WorkerError, match=r"ended before it was ready \(ended with exit code 1\)"
    ) as caught:
        start_engine(nodes=2, tp=2, environment={"PYTHONPATH": str(package.parent)})
    assert str(caught.value).endswith("server1/server.log:\nno such device")


def test_servers_end_with_the_engine(start_engine):
    engine = start_engine()
    ((running,),) = processes(engine)
    engine.close()
    psutil.wait_procs([running], 20)
    assert not running.is_running()


@pytest.mark.long
def test_a_server_whose_agent_is_killed_is_restarted(start_engine):
    engine = start_engine(options={"token_s": 0.05})
    expected = [one.tolist() for one in generate(engine).tokens]
    agent = psutil.Process(processes(engine)[0][0].ppid()).parent()
    killer = threading.Timer(0.3, agent.kill)
    killer.start()
    assert [one.tolist() for one in generate(engine).tokens] == expected
    killer.join()
    assert [server.lives for server in servers_of(engine)] == [2]


def test_the_key_of_a_server_is_only_in_a_private_file_until_it_starts(
    start_engine, kind, monkeypatch
):
    modes, forget = [], Launch.forget_settings

    def look(launch):
        modes.append((launch.slots[0].folder / "settings.yaml").stat().st_mode & 0o777)
        forget(launch)

    monkeypatch.setattr(Launch, "forget_settings", look)
    engine = start_engine()
    (server,) = servers_of(engine)
    ((running,),) = processes(engine)
    assert server.endpoint.key not in " ".join(running.cmdline())
    assert server.endpoint.key not in str(running.environ())
    assert not Path(running.cmdline()[-3]).exists()  # it has been read
    assert server.endpoint.key not in "".join(
        file.read_text() for file in server.launch.slots[0].folder.iterdir()
    )
    assert modes == [0o600]
    assert re.fullmatch("[0-9a-f]{64}", server.endpoint.key)
    with pytest.raises(ServerRefused, match="401"):
        Endpoint(server.endpoint.url).get(kind.label, 5)


@only_sglang
def test_the_error_for_a_failed_start_quotes_the_output_of_the_server(start_engine):
    with pytest.raises(WorkerError, match="No module named 'sglang'") as caught:
        start_engine(environment={"PYTHONPATH": "/nothing"})
    assert caught.value.code == "F91"


@only_sglang
def test_an_agent_that_cannot_run_fails_the_start_at_once(start_engine, monkeypatch, tmp_path):
    """Without waiting for the start deadline of the server."""
    monkeypatch.setattr(
        children, "agent_command", lambda folder: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    began = time.monotonic()
    with pytest.raises(
        WorkerError, match="cannot be started any more: what runs it ended with exit code 3"
    ) as caught:
        start_engine(start_deadline_s=300.0)
    assert time.monotonic() - began < 30
    assert str(tmp_path / "logs" / "server0.log") in str(caught.value)
