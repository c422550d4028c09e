"""Jobs that are interrupted: they continue exactly, or end for good,
and leave no process behind."""

import json
import time
from pathlib import Path

import psutil
import pytest
from run_files import ledger, numbers

from rlcli.launch.slurm.allocations import read_allocations

from .cluster import NODES, wait_for
from .runs import BY_SLURM, Project

ENDLESS = ("cluster.nodes=2", "train.steps=10000", "checkpoint.every_steps=4")
TWO_NODES = ("cluster.nodes=2", "train.steps=24", "checkpoint.every_steps=4")
SLOW = "toy.seconds=0.1"
GONE_WITHIN = 5.0
GONE_ELSEWHERE_WITHIN = 20.0

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def project(cluster, tmp_path):
    return Project(cluster, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """The same run without an interruption."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return Project(cluster, folder).here("train.steps=24", "cluster.devices_per_node=2")


def assert_same(run, undisturbed):
    """Numbers, and what each step took."""
    assert numbers(run.folder) == numbers(undisturbed)
    assert ledger(run.folder) == ledger(undisturbed)
    assert (run.folder / "models/actor/config.json").read_bytes() == (
        undisturbed / "models/actor/config.json"
    ).read_bytes()


def processes(run):
    """Name → process of all that the run has recorded, on all nodes,
    with its master and supervisor."""
    records = json.loads((run.folder / "procs.json").read_text())
    processes = {one["name"]: psutil.Process(one["pid"]) for one in records}
    holder = json.loads((run.folder / "lock").read_text())
    return processes | {
        "master": psutil.Process(holder["owner"]["pid"]),
        "supervisor": psutil.Process(holder["supervisor"]["pid"]),
    }


def assert_gone(family, seconds):
    _, alive = psutil.wait_procs(family, timeout=seconds)
    assert [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def test_a_preempted_run_commits_waits_and_continues_exactly(cluster, project, undisturbed):
    """Slurm signals the tasks of the job, and not its script."""
    run = project.submit(*TWO_NODES, SLOW)
    run.wait_for_steps(3)
    urgent = project.folder / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 1000\n")
    urgent_job = cluster.run(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        f"--nodes={len(NODES)}",
        "--exclusive",
        "--output=/dev/null",
        str(urgent),
    ).strip()
    run.wait_until_put_back()
    committed = json.loads((run.folder / "committed.json").read_text())["step"]
    assert committed == run.steps >= 3  # no step was lost
    assert (
        json.loads(project.rlcli("status", "run", "--json", "--runs", ".").stdout)["state"]
        == "waiting"
    )
    cluster.run("scancel", urgent_job)
    run.begin_again()
    run.wait_until("COMPLETED")
    assert_same(run, undisturbed)
    assert [(one.restart, one.step) for one in read_allocations(run.folder)] == [
        (0, None),
        (1, committed),
    ]


def test_a_run_that_lost_a_node_continues_exactly_from_its_last_checkpoint(
    cluster, project, undisturbed
):
    run = project.submit(*TWO_NODES, SLOW, "launch.slurm.nodelist=node[2-3]")
    run.wait_for_steps(6)
    family = [*processes(run).values()]
    cluster.lose_node("node3")
    try:
        assert_gone(family, GONE_ELSEWHERE_WITHIN)
        run.wait_until_put_back()
    finally:
        cluster.bring_back("node3")
    run.begin_again()
    run.wait_until("COMPLETED")
    assert_same(run, undisturbed)
    assert read_allocations(run.folder)[-1].step >= 4


@pytest.mark.parametrize(
    ("victim", "says"),
    [
        (
            "node1",
            (
                "node2 (node 1 of the run): the node is lost, and with it rank 1: its "
                "agent was killed by SIGKILL"
            ),
        ),
        ("master", "the run was killed by SIGKILL"),
    ],
)
def test_a_killed_process_ends_the_job_and_is_named(project, victim, says):
    run = project.submit(
        *ENDLESS, SLOW, "launch.slurm.requeues=0", "launch.slurm.nodelist=node[1-2]"
    )
    run.wait_for_steps(2)
    family = processes(run)
    family.pop(victim).kill()
    here = [
        one for name, one in family.items() if (name in ("node1", "rank1")) == (victim == "node1")
    ]
    assert_gone(here if victim == "node1" else [], GONE_WITHIN)
    assert_gone([*family.values()], GONE_ELSEWHERE_WITHIN)
    run.wait_until("FAILED")
    assert run.status["exit_code"] == 7
    assert says in run.status["message"]


def test_a_rank_that_is_killed_is_replaced_within_the_job(cluster, project, undisturbed):
    """Slurm ends the other tasks by a signal, which does not count as one that asks for a stop."""
    run = project.submit(*TWO_NODES, SLOW, "launch.max_restarts=1")
    run.wait_for_steps(5)
    processes(run)["rank1"].kill()
    run.wait_until("COMPLETED")
    assert_same(run, undisturbed)
    assert len(read_allocations(run.folder)) == 1
    assert "starting the workers again, restart 1 of 1" in run.log


def test_a_cancelled_run_leaves_no_process_and_resumes_as_another_job(
    cluster, project, undisturbed
):
    run = project.submit(*TWO_NODES, SLOW)
    run.wait_for_steps(5)
    family = [*processes(run).values()]
    refusal = project.rlcli("resume", "run", code=6).stderr
    assert refusal.startswith("error[F71] ")
    assert f"run: job {run.job} of this run is running" in refusal
    cluster.run("scancel", run.job)
    run.wait_until("CANCELLED")
    assert_gone(family, GONE_WITHIN)
    assert (
        json.loads(project.rlcli("status", "run", "--runs", ".", "--json").stdout)["state"]
        == "cancelled"
    )
    first = run.job
    report = json.loads(project.rlcli("resume", "run", "--json").stdout)
    again = project.run(run.folder)
    assert again.job == report["job"] != first
    again.wait_until("COMPLETED")
    assert_same(again, undisturbed)


def test_a_run_commits_and_is_requeued_before_its_time_is_up(cluster, project):
    """It commits at no other time."""
    run = project.submit("cluster.nodes=2", SLOW, "train.steps=10000", "launch.slurm.time=1m")
    run.wait_until_put_back()
    # Slurm may warn it half a minute early; on a slow machine it has not begun then
    if not run.steps:
        run.begin_again()
        run.wait_until_put_back()
    status = run.status
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert json.loads((run.folder / "committed.json").read_text())["step"] == status["step"] > 0


def test_a_run_without_progress_is_requeued_up_to_the_limit(project):
    run = project.submit(
        "cluster.nodes=2", "toy.kill_rank=1", "launch.slurm.requeues=1", "train.steps=10000"
    )
    run.wait_until_put_back()
    run.begin_again()
    run.wait_until("FAILED")
    assert [(one.restart, one.step) for one in read_allocations(run.folder)] == [
        (0, None),
        (1, None),
    ]
    assert run.status["exit_code"] == 7
    assert "rank 1 was killed by SIGKILL" in run.status["message"]
    assert "the job is not requeued again (launch.slurm.requeues is 1)" in run.log


def test_a_run_of_a_sweep_puts_only_itself_back(cluster, project):
    """The last one that begins has the number of the whole array."""
    told = project.rlcli(
        *("train", "toy.yaml", "--seeds", "2", "--run-dir", "sweep", "--json"),
        *(*BY_SLURM, SLOW, "train.steps=10000"),
    ).stdout
    first, last = (project.run(Path(folder)) for folder in json.loads(told)["runs"])
    for run in (first, last):
        run.wait_for_steps(2)
    cluster.run("scancel", "--batch", "--signal=USR1", last.job)
    last.wait_until("PENDING")
    assert first.state() == "RUNNING"
    assert cluster.field(first.job, "Restarts") == "0"


def test_a_stopped_run_is_not_requeued(cluster, project):
    run = project.submit(*ENDLESS, SLOW)
    run.wait_for_steps(2)
    began = time.monotonic()
    report = json.loads(project.rlcli("stop", "run", "--runs", ".", "--json").stdout)
    assert (report["how"], report["state"]) == ("stopped", "stopped")
    assert time.monotonic() - began < 60
    wait_for(lambda: run.state() == "COMPLETED", 30)
    assert cluster.field(run.job, "ExitCode") == "0:0"
    assert (run.status["state"], run.status["exit_code"]) == ("stopped", 75)
    assert cluster.field(run.job, "Restarts") == "0"
    assert run.status["step"] == json.loads((run.folder / "committed.json").read_text())["step"]


WARM = """\
extends: sft_math
models: {actor: {scratch: {hidden_size: 32, num_hidden_layers: 1, intermediate_size: 32}}}
datasets: {train: {args: {problems: 32}}}
train: {steps: 150, prompts_per_step: 8}
cluster: {device: cpu}
"""
AFTER = """\
extends: ppo_math
models: {actor: {path: "recipe:warm.yaml#actor"}}
datasets: {train: {args: {problems: 16}}, held_out: {args: {problems: 4}}}
generation: {max_new_tokens: 4}
train: {steps: 1, prompts_per_step: 4, eval: {every_steps: null}}
cluster: {device: cpu}
"""


def test_a_job_requeued_during_its_warm_start_continues_it(cluster, project):
    (project.folder / "warm.yaml").write_text(WARM)
    (project.folder / "after.yaml").write_text(AFTER)
    run = project.submit(recipe="after.yaml")
    run.wait_for(
        lambda: any(file.read_bytes() for file in project.folder.glob("runs/warm/*/metrics.jsonl"))
    )
    cluster.run("scancel", "--batch", "--signal=USR1", run.job)
    run.wait_until_put_back()
    run.begin_again()
    run.wait_until("COMPLETED")
    (warm,) = project.folder.glob("runs/warm/*")
    (resumed,) = (json.loads(line) for line in (warm / "resumes.jsonl").read_text().splitlines())
    assert 0 < resumed["step"] < 150
