"""`rlcli stop`, `status` and `logs` of real runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(420)

HOME = str(Path(__file__).parents[2])


def rlcli(*arguments):
    """A command next to the run: (exit code, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "rlcli", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": HOME},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.exhaustive
def test_a_run_of_two_ranks_is_found_read_and_stopped_with_a_checkpoint(endless, project):
    process = endless(
        "--quiet", "launch=local", "cluster.devices_per_node=2", folder="runs/toy/one"
    )
    family = psutil.Process(process.pid).children(recursive=True)
    document = json.loads(rlcli("status", "toy", "--json")[1])
    assert (document["state"], document["is_here"], document["supervisor"]) == (
        "running",
        True,
        process.pid,
    )
    assert {one["name"] for one in document["processes"]} == {"node0", "rank0", "rank1"}
    assert {one["pid"] for one in document["processes"]} <= {one.pid for one in family}
    assert json.loads(rlcli("logs", "toy", "--json")[1])["logs"].keys() >= {"rank0", "rank1"}
    attached = subprocess.Popen(
        [sys.executable, "-m", "rlcli", "attach", "toy"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": HOME},
    )
    assert attached.stderr.readline() == "run toy/one -> runs/toy/one\n"
    code, out, err = rlcli("stop", "toy")
    assert code == 0, err
    shown, _ = attached.communicate(timeout=60)
    assert attached.returncode == 75
    assert shown.startswith("toy/one stopped at step ")
    assert out.startswith("runs/toy/one stopped: stopped at step ")
    assert process.wait(20) == 75
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    status = json.loads((project / "runs/toy/one/status.json").read_text())
    assert (
        status["step"] == json.loads((project / "runs/toy/one/committed.json").read_text())["step"]
    )


@pytest.mark.long
def test_asking_twice_to_stop_counts_once_and_a_stuck_run_is_killed(endless, project):
    process = endless("--quiet", "launch.max_restarts=3", folder="runs/toy/one")
    owner = json.loads(rlcli("status", "toy", "--json")[1])["pid"]
    os.kill(owner, signal.SIGSTOP)
    for _ in range(2):
        code, out, _ = rlcli("stop", "toy", "--no-wait", "--json")
        assert (code, json.loads(out)["state"]) == (0, "stopping")
    assert psutil.Process(owner).status() == psutil.STATUS_STOPPED
    code, out, err = rlcli("stop", "toy", "--grace", "0.1")
    assert code == 0, err
    assert "killing it" in err
    assert out.startswith("runs/toy/one ended at once: failed at step ")
    assert process.wait(20) == 7
    assert (
        "killed by SIGKILL"
        in json.loads((project / "runs/toy/one/status.json").read_text())["message"]
    )
