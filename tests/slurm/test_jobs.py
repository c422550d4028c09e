"""How jobs of every kind stand, as Slurm itself says it."""

import pytest

from rlcli.errors import ResourceError
from rlcli.launch.slurm.jobs import cancel, look_up, look_up_one

from .cluster import wait_for


@pytest.fixture
def submit(cluster, tmp_path):
    def one(body, *options):
        script = tmp_path / "job"
        script.write_text(f"#!/bin/bash\n{body}\n")
        return cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, str(script)).strip()

    return one


def states(*jobs):
    found = look_up(jobs)
    return [found[job].state if job in found else None for job in jobs]


def test_jobs_of_every_kind_are_told_apart_in_one_question(cluster, submit):
    runs, fails, killed = submit("sleep 100", "--nodelist=node2"), submit("exit 3"), submit("kill -9 $$")
    waits = submit("sleep 1", f"--dependency=afterok:{runs}")
    row, done = submit("sleep 100", "--array=0-2%1"), submit("exit 0")
    jobs = (runs, fails, killed, waits, f"{row}_0", f"{row}_2", done, "999", "--help")
    expected = ["running", "failed", "failed", "waiting", "running", "waiting", "done", None, None]
    wait_for(lambda: states(*jobs) == expected, 30)
    found = look_up(jobs)
    assert (found[runs].nodes, found[runs].is_alive, found[done].is_alive) == ("node2", True, False)
    assert (found[waits].reason, found[f"{row}_2"].reason) == ("Dependency", "JobArrayTaskLimit")
    cancel(runs)
    wait_for(lambda: states(runs) == ["cancelled"], 30)


def test_a_job_whose_node_is_lost_waits_again(cluster, submit):
    job = submit("sleep 100", "--nodelist=node3", "--requeue")
    wait_for(lambda: states(job) == ["running"], 30)
    cluster.lose_node("node3")
    try:
        wait_for(lambda: states(job) == ["waiting"], 30)
        assert look_up_one(job).restarts == 1
    finally:
        cluster.bring_back("node3")


def test_nothing_but_an_id_reaches_the_command():
    with pytest.raises(ResourceError, match="is not the id of a job"):
        cancel("--user=root")
