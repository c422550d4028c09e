"""A reward in a pool: a process next to its rank, which overlaps with other calls, is limited,
and may die."""

import json
import os
import re
import sys
import time

import pytest

from rlcli.cli.main import main
from rlcli.errors import ProjectError, ResourceError, WorkerError
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.data_lane import DataLane

POOL = "models.reward.backend=cpu_pool"
TWO_RANKS = ("launch=local", "cluster.devices_per_node=2")

LAYOUTS = pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="inline"),
        pytest.param(TWO_RANKS, id="two ranks", marks=pytest.mark.exhaustive),
    ],
)

pytestmark = pytest.mark.timeout(420)
forked = pytest.mark.usefixtures("forked_processes")


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    excluded = ("time/", "tokens_per_second", "perf/", "restarts/")
    return [{k: v for k, v in record.items() if not k.startswith(excluded)} for record in lines]


def score(**args):
    return f"graph.score.interface={{type: toy_reward, args: {json.dumps(args)}}}"


def trouble(kind, **args):
    return (
        f"graph.score.interface={{type: toy_trouble, args: {json.dumps({'kind': kind, **args})}}}"
    )


@forked
@LAYOUTS
def test_a_pool_gives_the_same_numbers_as_a_reward_on_the_rank(train, layout):
    _, on_the_rank = train(*layout, name="there")
    finished, folder = train(*layout, POOL, name="pooled")
    assert finished.exit_code == 0
    assert records(folder) == records(on_the_rank)
    assert any("reward/odd" in record for record in records(folder))


@forked
def test_a_pool_drops_the_same_samples_as_a_reward_on_the_rank(train):
    drop = (score(drop=3), "train.max_redraws=10")
    _, on_the_rank = train(*drop, name="there")
    _, folder = train(*drop, POOL, name="pooled")
    assert records(folder) == records(on_the_rank)
    assert any(record.get("samples/dropped") for record in records(folder))


@pytest.mark.long
@forked
def test_a_call_waits_for_inputs_that_were_sent_for_a_pool_of_its_rank(train, monkeypatch):
    """They are sent once, for whichever call of the rank is first; calls in a pool do not make
    others wait for them."""
    handle = DataLane.handle

    def slow(self, request):
        time.sleep(0.2)
        return handle(self, request)

    monkeypatch.setattr(DataLane, "handle", slow)
    apart = ("models.actor.devices='0'", "models.critic.devices='0'", "models.reward.devices='0'")
    rollout = "models.actor.rollout={backend: toy, devices: '1'}"
    finished, _ = train(*TWO_RANKS, *apart, rollout, POOL, "graph.value.inputs=[packed_input_ids]")
    assert finished.exit_code == 0


@forked
def test_a_process_killed_during_a_call_is_replaced_and_nothing_is_lost(train):
    """Each process is killed in its third call; the next one does that call again."""
    quiet = trouble("none")
    _, undisturbed = train(quiet, name="there")
    finished, folder = train(trouble("kill -9"), POOL, name="pooled")
    assert (finished.exit_code, finished.steps_done) == (0, 3)
    assert records(folder) == records(undisturbed)


@pytest.mark.long
@forked
@LAYOUTS
def test_a_restart_is_reported_and_counted(train, capsys, layout):
    # longer than until the next heartbeat, with which a rank reports restarts
    slow = ("train.steps=8", "toy.seconds=0.3")
    _, folder = train(trouble("kill -9"), POOL, *layout, *slow, name="pooled")
    warned = r"warning: reward-pool\d on \S.* was killed by SIGKILL.*; it was started again"
    restarts = len(re.findall(warned, capsys.readouterr().err))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line).get("restarts/reward-pool", 0) for line in lines) == restarts >= 1
    with pytest.raises(SystemExit, match="0"):
        main(["status", str(folder)])
    assert re.search(rf"started again +reward-pool {restarts}\n", capsys.readouterr().out)


@forked
def test_a_call_that_kills_two_processes_ends_the_run_and_is_named(train, project):
    with pytest.raises(WorkerError) as caught:
        train(trouble("kill -9", at=1), POOL)
    assert caught.value.code == "F01"
    assert caught.value.what == (
        "reward-pool0 was killed by SIGKILL (out of memory?) while it worked on call score, 2 times"
    )
    assert str(project / "run/logs/reward-pool0.log") in caught.value.hint


@pytest.mark.exhaustive
def test_processor_time_is_limited(train):
    with pytest.raises(
        WorkerError,
        match=r"SIGPROF, as it used more than 2 s of processor time for a call while it",
    ):
        train(trouble("spin", at=1), "models.reward.backend={type: cpu_pool, args: {cpu_s: 2}}")


@pytest.mark.long
def test_memory_is_limited(train):
    with pytest.raises(ResourceError, match="call score needs more than 8 GiB of memory") as caught:
        train(
            trouble("16 GiB", at=1), "models.reward.backend={type: cpu_pool, args: {memory_gib: 8}}"
        )
    assert "models.reward.backend.args.memory_gib is the limit" in caught.value.hint


@pytest.mark.long
@forked
def test_an_exception_in_a_users_reward_is_reported_with_its_location(train, components):
    with pytest.raises(ProjectError, match=r"ZeroDivisionError|Speechless") as caught:
        train(trouble("no Exception", at=1), POOL)
    assert str(components / "interfaces/toy_trouble.py") in caught.value.where


@pytest.mark.long
@forked
def test_an_invalid_reward_is_reported_with_its_sample(train):
    with pytest.raises(ProjectError, match=r"gave rewards nan for sample .*row 8 of dataset train"):
        train(score(spoil="nan"), POOL)


@pytest.mark.long
def test_a_process_that_cannot_start_ends_the_run(train, monkeypatch):
    monkeypatch.setattr("rlcli.topology.groups.sys.executable", "/bin/false")
    with pytest.raises(WorkerError, match=r"reward-pool0 ended with exit code 1, 4 times"):
        train(POOL)


@pytest.mark.long
def test_a_memory_limit_too_low_to_start_is_the_error_of_the_run(train):
    with pytest.raises(
        ResourceError, match=r"takes [\d.]+ GiB of address space before it has done anything"
    ):
        train("models.reward.backend={type: cpu_pool, args: {memory_gib: 0.1}}")


@pytest.mark.long
def test_no_pool_process_remains_after_the_run(train, project):
    train(POOL)
    time.sleep(0.2)
    left = [
        pid for pid in os.listdir("/proc") if pid.isdigit() and _names(pid, str(project / "run"))
    ]
    assert not left


def _names(pid, folder):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return folder.encode() in file.read() and int(pid) != os.getpid()
    except OSError:
        return False


@forked
def test_a_pooled_reward_overlaps_with_the_calls_of_its_rank(project):
    """The reward takes as long as the values of the critic, which the same rank computes,
    and as its training."""
    takes = "interface={type: toy, args: {seconds: 0.4}}"
    slow = (f"graph.value.{takes}", f"graph.train_critic.{takes}", score(seconds=0.4))
    with PlainDisplay(sys.stderr) as display:
        run_recipe(
            load_recipe("toy.yaml", [*slow, POOL, "train.eval.dataset=null"]),
            project / "run",
            display,
        )
    lines = (project / "run/metrics.jsonl").read_text().splitlines()
    seconds = [record["time/step"] for record in map(json.loads, lines) if "time/step" in record]
    assert min(seconds) <= 0.8 * 1.3  # one after the other: 1.2
