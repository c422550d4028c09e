"""sglang servers started by a run: processes that agents start, and restart when they die."""

import re
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from fake_sglang_path import fake_python_path

from rlcli.backends._sglang_http import Endpoint, ServerRefused
from rlcli.backends._sglang_server import Launch
from rlcli.errors import WorkerError
from rlcli.launch import children
from rlcli.launch.children import Members, run_environment
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.generation import generate
from rlcli.topology.groups import Group, process_folder

QUICK = {"start_deadline_s": 20.0, "request_deadline_s": 5.0, "update_deadline_s": 10.0}


@pytest.fixture
def start_engine(tmp_path):
    """Builds an engine whose `count` servers are processes that the backend starts."""
    path = fake_python_path(tmp_path)
    with ExitStack() as stack:

        def make(count=1, **args):
            members = Members(tmp_path, run_environment(1))
            group = Group("server", "server", (0,) * count)
            stack.callback(members.stop)
            members.start([group], node=0)
            checks = BackendContract()
            checks.server_folders = tuple(
                process_folder(tmp_path, "server", group.name, index) for index in range(count)
            )
            checks.name, checks.args = "sglang", {
                **QUICK, "python": sys.executable, "servers": count, "update": "disk", "weights_folder": str(tmp_path),
                "environment": {"PYTHONPATH": path}, **args,
            }  # fmt: skip
            engine = checks.engine("llama")
            stack.callback(engine.close)
            return engine

        yield make


def servers_of(engine):
    return engine._servers.servers


def processes(engine):
    """The processes of each server: the children of its guardian, which is a child of its agent."""
    agents = {one.cmdline()[-1]: one for one in psutil.Process().children() if "rlcli.launch.server" in one.cmdline()}
    folders = [str(server.launch.slot.folder) for server in servers_of(engine)]
    return [guardian.children() for folder in folders for guardian in agents[folder].children()]


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


def test_servers_end_with_the_engine(start_engine):
    engine = start_engine()
    ((running,),) = processes(engine)
    engine.close()
    psutil.wait_procs([running], 20)
    assert not running.is_running()


def test_a_server_whose_agent_is_killed_is_restarted(start_engine):
    engine = start_engine(options={"token_s": 0.05})
    expected = [one.tolist() for one in generate(engine).tokens]
    agent = psutil.Process(processes(engine)[0][0].ppid()).parent()
    killer = threading.Timer(0.3, agent.kill)
    killer.start()
    assert [one.tolist() for one in generate(engine).tokens] == expected
    killer.join()
    assert [server.lives for server in servers_of(engine)] == [2]


def test_the_key_of_a_server_is_only_in_a_private_file_until_it_starts(start_engine, monkeypatch):
    modes, forget = [], Launch.forget_settings

    def look(launch):
        modes.append((launch.slot.folder / "settings.yaml").stat().st_mode & 0o777)
        forget(launch)

    monkeypatch.setattr(Launch, "forget_settings", look)
    engine = start_engine()
    (server,) = servers_of(engine)
    ((running,),) = processes(engine)
    assert server.endpoint.key not in " ".join(running.cmdline())
    assert server.endpoint.key not in str(running.environ())
    assert not Path(running.cmdline()[-3]).exists()  # it has been read
    assert server.endpoint.key not in "".join(file.read_text() for file in server.launch.slot.folder.iterdir())
    assert modes == [0o600]
    assert re.fullmatch("[0-9a-f]{64}", server.endpoint.key)
    with pytest.raises(ServerRefused, match="401"):
        Endpoint(server.endpoint.url).get("/model_info", 5)


def test_the_error_for_a_failed_start_quotes_the_output_of_the_server(start_engine):
    with pytest.raises(WorkerError, match="No module named 'sglang'") as caught:
        start_engine(environment={"PYTHONPATH": "/nothing"})
    assert caught.value.code == "F91"


def test_an_agent_that_cannot_run_fails_the_start_at_once(start_engine, monkeypatch, tmp_path):
    """Without waiting for the start deadline of the server."""
    monkeypatch.setattr(children, "agent_command", lambda folder: [sys.executable, "-c", "raise SystemExit(3)"])
    began = time.monotonic()
    with pytest.raises(WorkerError, match="cannot be started any more: what runs it ended with exit code 3") as caught:
        start_engine(start_deadline_s=300.0)
    assert time.monotonic() - began < 30
    assert str(tmp_path / "logs" / "server0.log") in str(caught.value)
