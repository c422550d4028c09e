"""`rlcli status` of runs whose jobs have ended and left the queue: with Slurm's accounting, by what
the real `sacct` says, and without, by the runs' files alone."""

import json
import os
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest

from rlcli.launch.slurm.commands import SlurmError
from rlcli.launch.slurm.jobs import Submission, look_up

from .accounting import AccountedCluster
from .cluster import Cluster, wait_for
from .runs import PATIENCE, Project

FORGETS = {"MinJobAge": 2}
LOST = "node3"
SLEEP = "sleep 300"

Case = namedtuple("Case", "in_accounts, with_accounts, without")
"""The end of a run: its job's state as sacct calls it, and the run's state where there is a sacct,
and where not."""

ENDS = {
    # what a run could record itself is the same both ways
    "done": Case("COMPLETED", "done", "done"),
    "failed": Case("FAILED", "failed", "failed"),
    # by scancel, which gives a run the time to record its end
    "stopped": Case("CANCELLED", "cancelled", "stopped"),
    # of the others only the accounting knows how they ended
    "silent": Case("COMPLETED", "died", "died"),
    "killed": Case("FAILED", "died", "died"),
    "cancelled": Case("CANCELLED", "cancelled", "died"),
    "held": Case("CANCELLED", "cancelled", "died"),
    "late": Case("TIMEOUT", "out of time", "died"),
    "lost": Case("NODE_FAIL", "node failed", "died"),
    "again": Case("COMPLETED", "died", "died"),  # was put back into the queue
    "part": Case("FAILED", "failed", "failed"),  # of an array
}
STATES = {
    "COMPLETED": "done",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "TIMEOUT": "out of time",
    "NODE_FAIL": "node failed",
}

pytestmark = pytest.mark.timeout(400)
WITH_ACCOUNTS = pytest.mark.parametrize(
    "cluster", [AccountedCluster], indirect=True, ids=["accounting"]
)


@pytest.fixture(scope="module", params=[AccountedCluster, Cluster], ids=["accounting", "none"])
def cluster(request, bring_up, tmp_path_factory):
    """In place of the one of the other tests: its controller soon forgets a job that has ended."""
    with bring_up(request.param(tmp_path_factory.mktemp("slurm"), FORGETS)) as cluster:
        yield cluster


@pytest.fixture
def has_accounts(cluster):
    return isinstance(cluster, AccountedCluster)


@pytest.fixture(scope="module")
def project(cluster, tmp_path_factory):
    return Project(cluster, tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def jobs(cluster, project):
    """The ids of the jobs of the runs in ENDS, which the controller has forgotten."""
    runs = {
        "done": project.submit(run_dir="runs/toy/done"),
        "stopped": project.submit(
            "train.steps=9999", "toy.seconds=0.1", run_dir="runs/toy/stopped"
        ),
        "failed": project.pretend("failed", "failed", "exit 3"),
        "silent": project.pretend("silent", "running", "exit 0"),
        "killed": project.pretend("killed", "running", "kill -9 $$"),
        "cancelled": project.pretend("cancelled", "running", SLEEP),
        "held": project.pretend("held", "submitted", SLEEP, "--hold"),
        "late": project.pretend("late", "running", SLEEP),
        "lost": project.pretend("lost", "running", SLEEP, f"--nodelist={LOST}", "--no-requeue"),
        "again": project.pretend("again", "running", f'[ -n "$SLURM_RESTART_COUNT" ] || {SLEEP}'),
        "part": project.pretend(
            "part", "failed", "exit $SLURM_ARRAY_TASK_ID", "--array=2", array_suffix="_2"
        ),
    }
    ids = {name: run.job for name, run in runs.items()}
    wait_for(
        lambda: all(
            is_running(cluster, ids[name]) for name in ("cancelled", "late", "lost", "again")
        ),
        30,
    )
    end_otherwise(cluster, ids)
    put_back(cluster, runs["again"])
    wait_for(lambda: runs["stopped"].steps > 0, PATIENCE)
    cluster.run("scancel", ids["stopped"])
    wait_for(lambda: not cluster.run("squeue", "--noheader", "--states=all"), PATIENCE)
    cluster.bring_back(LOST)
    return ids


def is_running(cluster, job):
    return cluster.field(job, "JobState") == "RUNNING"


def end_otherwise(cluster, ids):
    for name in ("cancelled", "held"):
        cluster.run("scancel", ids[name])
    # the controller refuses a time that has passed, and `now` has if the second ends on the way to
    # it
    cluster.run("scontrol", "update", f"jobid={ids['late']}", "endtime=now+2seconds")
    cluster.lose_node(LOST)


def put_back(cluster, run):
    cluster.run("scontrol", "requeue", run.job)
    wait_for(lambda: cluster.field(run.job, "JobState") == "PENDING", 30)
    run.begin_again()


def shown(project):
    """The output of `rlcli status` for each run, by name."""
    return {
        Path(one["run"]).name: one
        for one in json.loads(project.rlcli("status", "--json").stdout)["runs"]
    }


def states_shown(project):
    return {name: one["state"] for name, one in shown(project).items()}


def states_expected(has_accounts):
    return {name: end.with_accounts if has_accounts else end.without for name, end in ENDS.items()}


def test_ended_jobs_are_not_in_the_queue_but_in_the_accounts(cluster, jobs, has_accounts):
    """The tests below rely on this, as do the stand-ins of tests/launch."""
    for job in jobs.values():
        with pytest.raises(subprocess.CalledProcessError) as refused:
            cluster.run("scontrol", "show", "job", job)
        assert "Invalid job id" in refused.value.stderr
    listed = ",".join(jobs.values())
    query = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        "--format=JobID,State",
        f"--jobs={listed}",
    ]
    if not has_accounts:
        with pytest.raises(subprocess.CalledProcessError) as refused:
            cluster.run(*query)
        assert "Slurm accounting storage is disabled" in refused.value.stderr
        return
    recorded = dict(line.split("|") for line in cluster.run(*query).splitlines())
    assert {name: recorded[job].split()[0] for name, job in jobs.items()} == {
        name: end.in_accounts for name, end in ENDS.items()
    }
    assert recorded[jobs["held"]] == f"CANCELLED by {os.getuid()}"
    # a job that was put back has a record for each time; the last counts
    assert "REQUEUED" in cluster.run(*query, "--duplicates")


def test_jobs_have_the_states_of_the_accounts(jobs, has_accounts):
    jobs_found = look_up([*jobs.values(), "999999"])
    if not has_accounts:
        assert jobs_found == {}
        return
    assert {name: jobs_found[job].state for name, job in jobs.items()} == {
        name: STATES[end.in_accounts] for name, end in ENDS.items()
    }
    assert len(jobs_found) == len(jobs)
    assert (jobs_found[jobs["lost"]].nodes, jobs_found[jobs["held"]].nodes) == (LOST, None)
    assert jobs_found[jobs["late"]].starts.startswith("20")
    assert not any(job.is_alive for job in jobs_found.values())


def test_status_lists_the_state_of_every_run(project, jobs, has_accounts):
    statuses = shown(project)
    assert states_shown(project) == states_expected(has_accounts)
    assert {name: one["job"] for name, one in statuses.items()} == jobs
    assert (statuses["done"]["step"], statuses["failed"]["step"]) == (3, 2)
    reason = (
        "its job ended: TIMEOUT"
        if has_accounts
        else f"job {jobs['late']} is not in the queue any more"
    )
    assert statuses["late"]["message"].startswith(reason)
    if has_accounts:
        assert "its job is over (COMPLETED)" in statuses["silent"]["message"]
        assert "before the run began" not in statuses["held"]["message"]
    assert statuses["lost"]["nodes"] == (LOST if has_accounts else None)


@pytest.mark.parametrize("name", ["done", "stopped", "late", "lost"])
def test_status_of_one_run_names_the_end_of_its_job(project, jobs, has_accounts, name):
    end, expected = ENDS[name], states_expected(has_accounts)[name]
    assert json.loads(project.rlcli("status", name, "--json").stdout)["state"] == expected
    head, *rows = project.rlcli("status", name).stdout.splitlines()
    assert f"  {expected}" in head
    if has_accounts and name != "done":
        assert any(f"its job ended: {end.in_accounts}" in row for row in rows)


@WITH_ACCOUNTS
def test_a_run_in_a_cluster_chosen_by_name_is_looked_up_and_stopped_there(project):
    """Slurm finds clusters by name in the accounting."""
    run = project.submit(
        "train.steps=9999",
        "toy.seconds=0.1",
        "launch.slurm.options.clusters=emulated",
        run_dir="chosen",
    )
    assert Submission.read(run.folder).cluster == "emulated"
    run.wait_for_steps(1)
    assert look_up([run.job], "emulated") == look_up([run.job])
    with pytest.raises(SlurmError, match="elsewhere"):
        look_up([run.job], "elsewhere")
    assert json.loads(project.rlcli("status", "chosen", "--json").stdout)["state"] == "running"
    assert json.loads(project.rlcli("stop", "chosen", "--json").stdout)["how"] == "stopped"
    assert json.loads(project.rlcli("status", "chosen", "--json").stdout)["state"] == "stopped"


@WITH_ACCOUNTS
def test_status_falls_back_to_files_while_accounting_is_down(cluster, project, jobs):
    cluster.stop_slurmdbd()
    try:
        assert states_shown(project) == states_expected(False)
    finally:
        cluster.start_slurmdbd()
    assert states_shown(project) == states_expected(True)
