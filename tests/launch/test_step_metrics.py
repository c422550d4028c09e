"""What the record of a training step says of the flows: waits, copies, queues and totals.
By the toy recipe."""

import json
from types import SimpleNamespace

import pytest

from rlcli.launch import drive
from rlcli.runtime.master import MasterWorker

pytestmark = pytest.mark.timeout(420)  # a start on two ranks takes a while on a slow machine

TWO_RANKS = (
    "launch=local",
    "cluster.devices_per_node=2",
    "train.eval.dataset=null",
    "train.steps=5",
)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def takes(seconds):
    return f"{{type: toy, args: {{seconds: {seconds}}}}}"


def test_the_duration_of_steps_is_without_the_set_up_of_their_run(train, monkeypatch):
    now = [0.0]

    def taking(seconds, method):
        def timed(*arguments):
            now[0] += seconds
            return method(*arguments)

        return timed

    monkeypatch.setattr(drive, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for method, seconds in (("start", 100.0), ("run", 7.0), ("shut_down", 10.0)):
        monkeypatch.setattr(MasterWorker, method, taking(seconds, getattr(MasterWorker, method)))
    finished, _ = train("train.steps=1", "train.eval.dataset=null")
    assert finished.outcome.seconds == 7.0


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
def test_copies_of_weights_and_idle_ranks_are_timed(train):
    """The follower's rank has nothing to do but generate: it is idle while the other one trains for
    0.2 s."""
    _, folder = train(
        *TWO_RANKS,
        "models.actor.rollout={backend: toy, devices: '1'}",
        "models.actor.devices='0'",
        "models.critic.devices='0'",
        f"graph.train_actor.interface={takes(0.2)}",
        f"graph.gen.interface={takes(0.2)}",
    )
    for record in records(folder):
        assert 0 < record["time/train_actor.copy_to"] < record["time/step"]
        idle = {name: value for name, value in record.items() if name.startswith("time/idle/")}
        assert len(idle) == 2
        assert all(0.1 < value < record["time/step"] for value in idle.values())


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    "layout",
    [
        (),
        (
            *TWO_RANKS[:2],
            "models.actor.rollout.devices='1'",
            "models.actor.devices='0'",
            "models.critic.devices='0'",
        ),
    ],
    ids=["in one process", "on a rank of its own"],
)
def test_the_time_of_a_weight_copy_includes_loading_at_the_receiver(train, layout):
    receiver = "models.actor.rollout.backend={type: toy, args: {take_seconds: 0.5}}"
    _, folder = train(receiver, *TWO_RANKS[2:], *layout)
    for record in records(folder):
        assert record["time/train_actor.copy_to"] >= 0.5
        assert record["time/train_actor"] < 0.5


@pytest.mark.usefixtures("quick_ranks")
def test_waiting_samples_are_counted_under_the_call_they_wait_for(train):
    """Scoring is slow, generation is not, and may run ahead: samples wait to be scored."""
    _, folder = train(
        *TWO_RANKS,
        "train.max_staleness=3",
        "models.actor.devices='0'",
        "models.reward.devices='1'",
        "models.critic.devices='0'",
        "graph.score.interface={type: toy_reward, args: {seconds: 0.3}}",
    )
    deepest = {
        name: max(record[name] for record in records(folder))
        for name in ("queue/gen", "queue/score")
    }
    assert deepest["queue/score"] >= 8
    assert deepest["queue/gen"] < deepest["queue/score"]


def test_total_samples_and_tokens_add_up_over_the_steps(train):
    _, folder = train("train.eval.dataset=null", "log.samples_per_step=8")
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for record in records(folder):
        until = [sample for sample in samples if sample["step"] <= record["step"]]
        words = sum(len(f"{sample['prompt']} {sample['response']}".split()) for sample in until)
        assert (record["total/prompts"], record["total/tokens"]) == (len(until), words)
