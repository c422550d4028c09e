"""Heterogeneous jobs: roles that need other nodes get them, and the run is the same."""

import json

import pytest
from run_files import numbers

from rlcli.launch.slurm.allocations import read_allocations

from .runs import Project

PARTS = (
    "launch.slurm.parts=[{nodes: 1, nodelist: node3}, {nodes: 1, nodelist: "
    "node1, cpus_per_task: 2}]"
)
TWO_NODES = ("cluster.nodes=2", PARTS)
SLOW = "toy.seconds=0.1"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def project(cluster, tmp_path):
    return Project(cluster, tmp_path)


def test_a_run_on_two_kinds_of_nodes_gives_the_same_numbers(cluster, project):
    run = project.submit(*TWO_NODES)
    run.wait_until("COMPLETED")
    assert numbers(run.folder) == numbers(project.here("cluster.devices_per_node=2"))
    records = json.loads((run.folder / "procs.json").read_text())
    assert [(one["name"], one["node"]) for one in records] == [
        ("node0", 0),
        ("node1", 1),
        ("rank0", 0),
        ("rank1", 1),
    ]
    (allocation,) = read_allocations(run.folder)
    assert allocation.nodes == "node3,node1"
    assert "done" in project.rlcli("status", str(run.folder)).stdout


def test_a_requeued_heterogeneous_job_continues_where_it_was(cluster, project):
    run = project.submit(*TWO_NODES, "train.steps=40", SLOW)
    run.wait_for_steps(3)
    shown = json.loads(project.rlcli("status", str(run.folder), "--json").stdout)
    assert (shown["state"], shown["nodes"]) == ("running", "node3,node1")
    cluster.run("scancel", "--batch", "--signal=USR1", run.job)
    run.wait_until_put_back()
    run.begin_again()
    run.wait_until("COMPLETED")
    assert numbers(run.folder) == numbers(
        project.here("cluster.devices_per_node=2", "train.steps=40")
    )
    assert len(read_allocations(run.folder)) == 2


def test_stopping_a_heterogeneous_job_stops_all_of_its_parts(cluster, project):
    run = project.submit(*TWO_NODES, "train.steps=1000")
    run.wait_for_steps(2)
    project.rlcli("stop", str(run.folder))
    run.wait_until("COMPLETED")
    assert (run.status["state"], run.status["exit_code"]) == ("stopped", 75)
    assert not cluster.run("squeue", "--noheader", "--states=running")


def test_a_lost_node_of_one_part_requeues_all_parts(cluster, project):
    run = project.submit(*TWO_NODES, "train.steps=40", "checkpoint.every_steps=2", SLOW)
    run.wait_for_steps(4)
    cluster.lose_node("node1")
    try:
        run.wait_until_put_back()
    finally:
        cluster.bring_back("node1")
    run.begin_again()
    run.wait_until("COMPLETED")
    assert numbers(run.folder) == numbers(
        project.here("cluster.devices_per_node=2", "train.steps=40")
    )
    assert read_allocations(run.folder)[-1].step >= 2
