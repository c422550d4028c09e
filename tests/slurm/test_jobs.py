"""States of jobs of every kind, as Slurm itself reports them."""

import pytest

from rlcli.errors import ResourceError
from rlcli.launch.slurm.jobs import cancel, look_up, look_up_one

from .cluster import wait_for


@pytest.fixture
def submit(cluster, tmp_path):
    def submit_script(body, *options):
        script = tmp_path / "job"
        script.write_text(f"#!/bin/bash\n{body}\n")
        return cluster.run(
            "sbatch", "--parsable", "--output=/dev/null", *options, str(script)
        ).strip()

    return submit_script


def states(*jobs):
    jobs_found = look_up(jobs)
    return [jobs_found[job].state if job in jobs_found else None for job in jobs]


def test_states_of_many_jobs_are_read_with_one_query(cluster, submit):
    runs, fails, killed = (
        submit("sleep 100", "--nodelist=node2"),
        submit("exit 3"),
        submit("kill -9 $$"),
    )
    waits = submit("sleep 1", f"--dependency=afterok:{runs}")
    row, done = submit("sleep 100", "--array=0-2%1"), submit("exit 0")
    jobs = (runs, fails, killed, waits, f"{row}_0", f"{row}_2", done, "999", "--help")
    expected = ["running", "failed", "failed", "waiting", "running", "waiting", "done", None, None]
    wait_for(lambda: states(*jobs) == expected, 30)
    jobs_found = look_up(jobs)
    assert (jobs_found[runs].nodes, jobs_found[runs].is_alive, jobs_found[done].is_alive) == (
        "node2",
        True,
        False,
    )
    assert (jobs_found[waits].reason, jobs_found[f"{row}_2"].reason) == (
        "Dependency",
        "JobArrayTaskLimit",
    )
    cancel(runs)
    wait_for(lambda: states(runs) == ["cancelled"], 30)


def test_a_job_that_lost_its_node_is_requeued(cluster, submit):
    job = submit("sleep 100", "--nodelist=node3", "--requeue")
    wait_for(lambda: states(job) == ["running"], 30)
    cluster.lose_node("node3")
    try:
        wait_for(lambda: states(job) == ["waiting"], 30)
        assert look_up_one(job).restarts == 1
    finally:
        cluster.bring_back("node3")


def test_cancel_accepts_only_job_ids():
    with pytest.raises(ResourceError, match="is not the id of a job"):
        cancel("--user=root")
