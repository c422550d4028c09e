"""Injected faults: refused unless enabled, reported before they happen,
and raised at the requested passages."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcli.errors import UsageError
from rlcli.failpoints import check_failpoints, failpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def faults(monkeypatch, tmp_path):
    """Sets faults and returns a function that reads the events. A unique text separates passages
    from other tests'."""
    log = tmp_path / "events.jsonl"

    def set_faults(text: str):
        monkeypatch.setenv("RLCLI_FAILPOINTS", f"{text};{tmp_path.name}:note")
        monkeypatch.setenv("RLCLI_ENABLE_FAILPOINTS", "1")
        monkeypatch.setenv("RLCLI_FAILPOINT_EVENTS", str(log))
        return lambda: (
            [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        )

    return set_faults


def test_failpoints_do_nothing_unless_faults_are_set(monkeypatch):
    monkeypatch.delenv("RLCLI_FAILPOINTS", raising=False)
    failpoint("anywhere")
    check_failpoints()


@pytest.mark.parametrize("enabled", [None, "0", "yes"])
def test_faults_are_refused_unless_enabled(monkeypatch, enabled):
    monkeypatch.setenv("RLCLI_FAILPOINTS", "elsewhere:kill")
    if enabled is None:
        monkeypatch.delenv("RLCLI_ENABLE_FAILPOINTS", raising=False)
    else:
        monkeypatch.setenv("RLCLI_ENABLE_FAILPOINTS", enabled)
    for refuse in (check_failpoints, lambda: failpoint("anywhere")):
        with pytest.raises(UsageError, match="would fail on purpose"):
            refuse()


@pytest.mark.parametrize(
    "text", ["a", "a:b", "a:ENOTHING", "a:kill@", "a:kill@x", "a:sleep", ":kill", "a:E2BIG@1-"]
)
def test_invalid_faults_are_refused(monkeypatch, text):
    monkeypatch.setenv("RLCLI_FAILPOINTS", text)
    monkeypatch.setenv("RLCLI_ENABLE_FAILPOINTS", "1")
    with pytest.raises(UsageError, match="is not a fault"):
        check_failpoints()


def test_an_errno_is_raised_at_the_requested_passages(faults):
    events = faults("disk:ENOSPC@2-3")
    for number in range(1, 6):
        failpoint("elsewhere")
        if number in (2, 3):
            with pytest.raises(OSError, match="No space left") as caught:
                failpoint("disk")
            assert caught.value.errno == errno.ENOSPC
        else:
            failpoint("disk")
    assert [(event["failpoint"], event["action"], event["passage"]) for event in events()] == [
        ("disk", "ENOSPC", 2),
        ("disk", "ENOSPC", 3),
    ]


def test_a_star_matches_every_failpoint(faults):
    events = faults("*:note@2-3")
    for name in ("a", "b", "c", "d"):
        failpoint(name)
    assert [event["failpoint"] for event in events()] == ["b", "c"]


def test_a_failpoint_sleeps(faults):
    faults("slow:sleep0.05")
    began = time.monotonic()
    failpoint("slow")
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_fault_is_reported_before_the_process_is_killed_or_stopped(tmp_path, action, number):
    environment = {
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
        "RLCLI_FAILPOINTS": f"here:{action}@2",
        "RLCLI_ENABLE_FAILPOINTS": "1",
    }
    program = "from rlcli.failpoints import failpoint\nfor _ in range(3): failpoint('here')"
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        received = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)
        assert received == number
        assert json.loads(process.stderr.readline()) == {
            "failpoint": "here",
            "action": action,
            "passage": 2,
            "pid": process.pid,
        }
    finally:
        process.kill()
        process.stderr.close()
        if action == "stop":
            os.waitpid(process.pid, 0)
        process.returncode = 0
