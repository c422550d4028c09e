"""`rlcli status` and `rlcli stop` of runs that are jobs,
by the reports of Slurm and by their files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.launch.slurm.jobs import look_up_one

from .cluster import wait_for
from .runs import HOME, Project

STOPS = 'trap "exit 75" USR1; while true; do sleep 0.1; done'
"""The body of a job that ends when it is asked to."""


def rlcli(cluster, folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "rlcli", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**cluster.environment, "PYTHONPATH": HOME},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def run_of(cluster, tmp_path):
    """The id of the job of a run that records only its state."""
    project = Project(cluster, tmp_path)
    return lambda *state: project.pretend(*state).job


def test_status_and_stop_of_running_waiting_and_ended_jobs(cluster, run_of, tmp_path):
    jobs = {
        "runs": run_of("runs", "running", STOPS, "--nodelist=node2"),
        "waits": run_of("waits", "stopped", STOPS, "--hold"),
        "killed": run_of("killed", "running", "kill -9 $$"),
        "cancelled": run_of("cancelled", "running", STOPS, "--hold"),
    }
    cluster.run("scancel", jobs["cancelled"])

    def states():
        return {
            Path(one["run"]).name: one["state"]
            for one in rlcli(cluster, tmp_path, "status", "--json")["runs"]
        }

    expected = {"runs": "running", "waits": "waiting", "killed": "died", "cancelled": "cancelled"}
    wait_for(lambda: states() == expected, 60)
    shown = rlcli(cluster, tmp_path, "status", "runs", "--json")
    assert (shown["job"], shown["nodes"], shown["is_here"]) == (jobs["runs"], "node2", False)
    assert rlcli(cluster, tmp_path, "status", "waits", "--json")["message"] == "JobHeldUser"
    # a run is asked first, by a signal that its job passes on, and does not go back into the queue
    stopped = rlcli(cluster, tmp_path, "stop", "runs", "--json")
    assert stopped["how"] == "stopped"
    assert cluster.field(jobs["runs"], "Requeue") == "0"
    assert cluster.field(jobs["runs"], "ExitCode") == "75:0"
    # one that waits leaves the queue
    assert rlcli(cluster, tmp_path, "stop", "waits", "--json")["state"] == "cancelled"
    assert look_up_one(jobs["waits"]).state == "cancelled"


def test_a_job_that_ignores_the_signal_is_cancelled(cluster, run_of, tmp_path):
    job = run_of("deaf", "running", 'trap "" USR1; sleep 100 & wait; sleep 100')
    wait_for(lambda: look_up_one(job).state == "running", 30)
    assert (
        rlcli(cluster, tmp_path, "stop", "deaf", "--grace", "1", "--json")["how"] == "ended at once"
    )
    wait_for(lambda: look_up_one(job).state == "cancelled", 30)
