"""Servers and pools of a run: started, noticed when they die, replaced, given up, and ended with
what they started."""

import errno
import os
import signal
import sys
import time
import urllib.request

import psutil
import pytest

from rlcli.errors import WorkerError
from rlcli.launch import children
from rlcli.launch.children import Members, run_environment
from rlcli.launch.inline import check_members
from rlcli.launch.launcher import Death, Restart
from rlcli.server_slot import LOST, PORT, ServerSlot
from rlcli.topology.groups import GIVEN_UP, RANKS, Group, process_folder

SERVER = Group("files", "server", (0, 1, 0), environment={"RLCLI_TEST": "here"})
POOL = Group("pool", "pool", (0,), (sys.executable, "-c", "import time; time.sleep(1000)"))
BRIEF = Group("brief", "pool", (0,), (sys.executable, "-c", ""))
STUBBORN = Group(
    "stubborn",
    "pool",
    (0,),
    (
        sys.executable,
        "-c",
        "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)",
    ),
)
FILES = (sys.executable, "-P", "-m", "http.server", PORT, "--bind", "127.0.0.1")


@pytest.fixture
def members(tmp_path):
    members = Members(tmp_path, run_environment(1), tmp_path)
    yield members
    members.stop()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return result


def answers(slot):
    try:
        return (
            bool(slot.port)
            and urllib.request.urlopen(f"http://127.0.0.1:{slot.port}/", timeout=5).status == 200
        )
    except OSError:
        return False


def test_a_server_restarts_with_the_command_of_each_new_request(members, tmp_path):
    members.start([Group(RANKS, "ranks", (0, 1)), SERVER, POOL], node=0)
    assert set(members.pids()) == {("files", 0), ("files", 2), ("pool", 0)}
    assert psutil.Process(members.pids()["files", 0]).environ()["RLCLI_TEST"] == "here"
    slot = ServerSlot(process_folder(tmp_path, "server", "files", 0))
    slot.start(FILES, {"RLCLI_OTHER": "there"})
    wait_for(lambda: answers(slot))
    (running,) = psutil.Process(members.pids()["files", 0]).children()[0].children()
    assert running.environ()["RLCLI_OTHER"] == "there"
    assert members.new_restarts() == []
    running.kill()
    assert wait_for(lambda: slot.exit_code) == -signal.SIGKILL
    slot.start(["/there/is/none"], {})
    assert wait_for(lambda: slot.exit_code) == 1
    assert "/there/is/none" in slot.last_words()
    assert wait_for(members.new_restarts) == [
        Restart("files", 0, "was killed by SIGKILL (out of memory?)")
    ]
    slot.start(FILES, {})
    wait_for(lambda: answers(slot))
    assert wait_for(members.new_restarts) == [Restart("files", 0, "ended with exit code 1")]
    slot.start(FILES, {})
    assert wait_for(members.new_restarts) == [Restart("files", 0, "did not answer")]
    port = slot.port
    slot.stop()
    wait_for(lambda: slot.exit_code is not None)
    assert slot.port != port
    assert members.deaths() == []


def test_a_server_is_reported_as_ended_when_its_agent_is_killed(members, tmp_path):
    members.start([SERVER], node=1)
    slot = ServerSlot(process_folder(tmp_path, "server", "files", 1))
    slot.start(FILES, {})
    wait_for(lambda: answers(slot))
    os.kill(members.pids()["files", 1], signal.SIGKILL)
    assert wait_for(lambda: slot.exit_code) == 137
    assert not answers(slot)
    slot.start(FILES, {})
    wait_for(lambda: answers(slot))
    assert wait_for(members.new_restarts) == [
        Restart("files", 1, "ended with the agent that ran it")
    ]


def test_a_dead_pool_process_is_replaced_until_it_has_died_too_often(members, monkeypatch):
    monkeypatch.setattr(children, "REPLACEMENTS", 1)
    members.start([POOL], node=0)
    first = members.pids()["pool", 0]
    os.kill(first, signal.SIGKILL)
    second = wait_for(lambda: next((pid for pid in members.pids().values() if pid != first), None))
    assert members.deaths() == []
    assert members.new_restarts() == [Restart("pool", 0, "was killed by SIGKILL (out of memory?)")]
    assert members.new_restarts() == []
    check_members(members)
    os.kill(second, signal.SIGKILL)
    (death,) = wait_for(members.deaths)
    assert death == Death("pool", 0, 0, -signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=r"pool0 was killed by SIGKILL \(out of memory\?\), "
    ) as caught:
        check_members(members)
    assert (caught.value.code, caught.value.where) == ("F01", "pool0")
    assert str(death) == "was killed by SIGKILL (out of memory?)"


def test_deaths_that_are_far_apart_do_not_add_up(members, monkeypatch):
    monkeypatch.setattr(children, "REPLACEMENTS", 1)
    monkeypatch.setattr(children, "REPLACED_WITHIN", 0.0)
    members.start([POOL], node=0)
    for _ in range(2):
        before = members.pids()["pool", 0]
        os.kill(before, signal.SIGKILL)
        wait_for(lambda before=before: members.pids()["pool", 0] != before)
    assert members.deaths() == []


def test_no_signal_goes_to_a_number_that_may_be_another_processs(members, monkeypatch):
    """Such is that of a process whose exit code was read."""
    monkeypatch.setattr(children, "REPLACEMENTS", 1)
    signal_group, reached = os.killpg, []

    def note(group, number):
        if number == signal.SIGKILL:
            reached.append(psutil.pid_exists(group))
        signal_group(group, number)

    monkeypatch.setattr(os, "killpg", note)
    members.start([POOL, BRIEF], node=0)
    wait_for(members.deaths)
    members.stop()
    assert reached
    assert all(reached)


@pytest.fixture
def full_machine(monkeypatch):
    """Lets so many starts of processes fail."""
    start_child = children.start_child

    def fail(times):
        failures = iter(range(times))

        def start(*arguments):
            if next(failures, None) is not None:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return start_child(*arguments)

        monkeypatch.setattr(children, "start_child", start)

    monkeypatch.setattr(children, "LOOK_SECONDS", 0.05)
    return fail


def test_a_replacement_that_cannot_be_started_is_tried_again(members, full_machine, caplog):
    members.start([POOL], node=0)
    first = members.pids()["pool", 0]
    full_machine(2)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: members.pids()["pool", 0] != first)
    assert members.new_restarts() == [Restart("pool", 0, "was killed by SIGKILL (out of memory?)")]
    assert members.deaths() == []
    reason = f"[Errno {errno.EAGAIN}] {os.strerror(errno.EAGAIN)}"
    assert caplog.messages == [f"pool0 cannot be started again: {reason}"] * 2


def test_replacements_that_cannot_be_started_are_given_up(members, full_machine, tmp_path):
    members.start([POOL, Group("other", "pool", (0,), POOL.command)], node=0)
    full_machine(children.REPLACEMENTS)
    os.kill(members.pids()["pool", 0], signal.SIGKILL)
    assert wait_for(members.deaths) == [Death("pool", 0, 0, -signal.SIGKILL)]
    given_up = process_folder(tmp_path, "pool", "pool", 0) / GIVEN_UP
    wait_for(given_up.exists)
    assert members.new_restarts() == []
    os.kill(members.pids()["other", 0], signal.SIGKILL)
    assert wait_for(members.new_restarts)[0].group == "other"


def test_a_pool_process_that_cannot_start_logs_the_reason(members, tmp_path, monkeypatch):
    monkeypatch.setattr(children, "REPLACEMENTS", 0)
    members.start(
        [
            Group(
                "broken", "pool", (0,), (sys.executable, "-c", "raise SystemExit('no such model')")
            )
        ],
        node=0,
    )
    (death,) = wait_for(members.deaths)
    assert (death.exit, str(death)) == (1, "ended with exit code 1")
    assert (tmp_path / "logs" / "broken0.log").read_text() == "no such model\n"
    assert (tmp_path / "logs" / "broken0.log").stat().st_mode & 0o077 == 0


def test_the_client_learns_at_once_that_its_servers_agent_is_given_up(
    members, tmp_path, monkeypatch
):
    monkeypatch.setattr(children, "REPLACEMENTS", 0)
    members.start([SERVER], node=1)
    slot = ServerSlot(process_folder(tmp_path, "server", "files", 1))
    slot.start(FILES, {})
    wait_for(lambda: answers(slot))
    assert slot.given_up is None
    os.kill(members.pids()["files", 1], signal.SIGKILL)
    log = tmp_path / "logs" / "files1.log"
    reason = f"what runs it was killed by SIGKILL (out of memory?), 1 times (see {log})"
    assert wait_for(lambda: slot.given_up) == reason
    assert (slot.exit_code, slot.port) == (LOST, None)
    slot.start(FILES, {})
    assert (slot.exit_code, slot.port) == (LOST, None)


def test_stopping_members_also_ends_the_processes_that_they_started(members):
    members.start([STUBBORN], node=0)
    process = psutil.Process(members.pids()["stubborn", 0])
    (child,) = wait_for(process.children)
    members.stop()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5)
    assert not process.is_running()
