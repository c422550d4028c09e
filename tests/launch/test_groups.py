"""Servers and pools of a run: started, found, noticed when they die, replaced and ended, by either launcher."""

import os
import signal
import sys
import time
import urllib.request

import psutil
import pytest

from rlcli.launch.children import Members, run_environment
from rlcli.launch.launcher import Death
from rlcli.topology.groups import PORT, Group

SERVER = Group(
    "files", "server", (0, 0), (sys.executable, "-P", "-m", "http.server", PORT, "--bind", "127.0.0.1"),
    {"RLCLI_TEST": "here"},
)  # fmt: skip
POOL = Group("pool", "pool", (0,), (sys.executable, "-c", "import time; time.sleep(1000)"))
STUBBORN = Group(
    "stubborn", "pool", (0,),
    (sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"),
)  # fmt: skip


@pytest.fixture
def members(tmp_path):
    made = Members(tmp_path, "127.0.0.1", lambda node: (run_environment(1), tmp_path))
    yield made
    made.stop(0)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


def answers(address):
    try:
        return urllib.request.urlopen(f"http://{address}/", timeout=5).status == 200
    except OSError:
        return False


def test_each_process_of_a_server_has_an_address_of_its_own(members):
    members.start(SERVER)
    members.start(POOL)
    found = members.addresses()
    assert set(found) == {("files", 0), ("files", 1)}
    assert len(set(found.values())) == 2
    for address in found.values():
        wait_for(lambda address=address: answers(address))
    assert psutil.Process(members.pids()["files", 0]).environ()["RLCLI_TEST"] == "here"
    assert members.deaths() == []


def test_one_that_is_killed_is_reported_and_replaced(members):
    members.start(SERVER)
    members.start(POOL)
    os.kill(members.pids()["files", 1], signal.SIGKILL)
    (death,) = wait_for(members.deaths)
    assert death == Death("files", 1, 0, -signal.SIGKILL)
    assert str(death) == "was killed by SIGKILL (out of memory?)"
    before = members.pids()
    members.restart("files", 1)
    wait_for(lambda: answers(members.addresses()["files", 1]))
    assert members.deaths() == []
    after = members.pids()
    assert after["files", 0] == before["files", 0]
    assert after["files", 1] != before["files", 1]


def test_one_that_cannot_start_says_why_in_its_log(members, tmp_path):
    members.start(Group("broken", "server", (0,), (sys.executable, "-c", "raise SystemExit('no such model')")))
    (death,) = wait_for(members.deaths)
    assert (death.exit, str(death)) == (1, "ended with exit code 1")
    assert (tmp_path / "broken0.log").read_text() == "no such model\n"
    assert (tmp_path / "broken0.log").stat().st_mode & 0o077 == 0


def test_they_end_with_all_that_they_have_started(members):
    members.start(STUBBORN)
    process = psutil.Process(members.pids()["stubborn", 0])
    (child,) = wait_for(process.children)
    members.stop(0.2)
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5)
    assert not process.is_running()
