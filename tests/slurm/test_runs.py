"""Whole runs as jobs: what they leave behind is what `launch=local` leaves behind."""

import json
import sys
from pathlib import Path

import psutil
import pytest
from fake_server_path import fake_python_path
from run_files import numbers
from toy_project import TINY_PPO

from .runs import BY_SLURM, Project

HOSTILE = 'it\'s "here"; $(touch BROKEN) `touch BROKEN` %j \\n\n#SBATCH --wrap=evil'
TWO_BY_TWO = ("cluster.device=cpu", "cluster.nodes=2", "cluster.devices_per_node=2")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def project(cluster, tmp_path):
    return Project(cluster, tmp_path)


def test_ppo_on_two_nodes_of_two_ranks_gives_the_numbers_of_four(project):
    """In a folder whose name arrives byte for byte."""
    run = project.submit(*TINY_PPO, *TWO_BY_TWO, recipe="ppo_math", run_dir=HOSTILE)
    assert run.folder.name == HOSTILE
    run.wait_until("COMPLETED")
    here = project.here(
        *TINY_PPO, "cluster.device=cpu", "cluster.devices_per_node=4", recipe="ppo_math"
    )
    assert numbers(run.folder) == numbers(here)
    for file in (
        "samples.jsonl",
        "models/actor/model.safetensors",
        "models/critic/model.safetensors",
    ):
        assert (run.folder / file).read_bytes() == (here / file).read_bytes(), file
    records = json.loads((run.folder / "procs.json").read_text())
    assert [(one["name"], one["node"]) for one in records] == [
        ("node0", 0),
        ("node1", 1),
        ("rank0", 0),
        ("rank1", 0),
        ("rank2", 1),
        ("rank3", 1),
    ]
    assert not list(project.folder.rglob("BROKEN"))
    assert not (run.folder / "meeting").exists()
    assert "done" in project.rlcli("status", str(run.folder)).stdout


def test_servers_are_started_on_their_nodes(project):
    path = fake_python_path(project.folder)
    servers = {"python": sys.executable, "update": "disk", "environment": {"PYTHONPATH": path}}
    run = project.submit(
        *TINY_PPO,
        "cluster.device=cpu",
        "cluster.nodes=2",
        f"models.actor.rollout.backend.args={json.dumps(servers)}",
        recipe="ppo_math",
        options=("--with", "sglang"),
    )
    run.wait_until("COMPLETED")
    records = {one["name"]: one for one in json.loads((run.folder / "procs.json").read_text())}
    assert [records[f"actor_rollout-server{index}"]["node"] for index in (0, 1)] == [0, 1]
    assert not [name for name, one in records.items() if psutil.pid_exists(one["pid"])]


def test_a_job_that_slurm_refuses_is_one_error_and_leaves_nothing(project):
    before = sorted(project.folder.iterdir())
    done = project.rlcli("train", "toy.yaml", *BY_SLURM, "launch.slurm.partition=nowhere", code=6)
    assert "error[F66]" in done.stderr
    assert "invalid partition specified: nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(project.folder.iterdir()) == before


def test_a_folder_that_nodes_do_not_share_is_found_at_once(cluster, project):
    """Node 4 sees another folder of that name."""
    folder = cluster.unshared / "run"
    run = project.submit("cluster.nodes=2", "launch.slurm.nodelist=node[3-4]", run_dir=str(folder))
    run.wait_until("FAILED")
    assert run.status["exit_code"] == 6
    assert (
        "error[F67] node4 (node 1 of the run): the node does not share the run's folder"
        in run.status["message"]
    )
    assert cluster.field(run.job, "Restarts") == "0"


def test_seeds_are_an_array(project):
    told = project.rlcli(
        "train", "toy.yaml", "--seeds", "2", "--run-dir", "sweep", "--json", *BY_SLURM
    ).stdout
    runs = [Path(folder) for folder in json.loads(told)["runs"]]
    assert [folder.name for folder in runs] == ["1-seed-5", "2-seed-6"]
    for folder in runs:
        project.run(folder).wait_until("COMPLETED")
    shown = json.loads(project.rlcli("status", "--runs", "sweep", "--json").stdout)["runs"]
    assert {(Path(one["run"]).name, one["state"], one["step"]) for one in shown} == {
        ("1-seed-5", "done", 3),
        ("2-seed-6", "done", 3),
    }
    assert numbers(runs[1]) == numbers(project.here("seed=6"))
    (group,) = json.loads(project.rlcli("compare", "sweep", "--json").stdout)["groups"]
    assert len(group["runs"]) == 2
