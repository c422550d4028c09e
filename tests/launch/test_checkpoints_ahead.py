"""Checkpoints and evaluations while samples are made ahead of training: neither waits for them,
and none is lost."""

import json
import shutil

import pytest
from run_files import ledger, numbers

from rlcli.runtime.data_order import DataOrder, training_id

pytestmark = [pytest.mark.timeout(420), pytest.mark.usefixtures("quick_ranks")]

AHEAD = (
    "train.max_staleness=2",
    "train.prompts_per_draw=5",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=9",
)
PLAIN = (*AHEAD, "train.eval.dataset=null", "train.steps=6")
DROPPING = ("graph.score.interface={type: toy_reward, args: {drop: 3}}",)
TWO_RANKS = (
    "launch=local",
    "cluster.devices_per_node=2",
    "models.critic.devices='1'",
    "models.reward.devices='0'",
)


def state_of(folder, step):
    return json.loads((folder / f"checkpoints/step-{step:012d}/state.json").read_text())


def sample(draw):
    return training_id(*draw[:2])


def assert_each_sample_is_in_one_place(folder, step):
    """By the checkpoint of a step, each drawn sample is in exactly one place: trained, dropped,
    waiting or ready."""
    state = state_of(folder, step)
    places = [line["sample"] for line in ledger(folder) if line["step"] <= step]
    places += [sample(draw) for draw in state["returned"]] + [
        sample(one["draw"]) for one in state["ready"]
    ]
    order = DataOrder(20, seed=5)
    assert sorted(places) == sorted(
        training_id(*order.at(position)) for position in range(state["drawn"])
    )


def trained(folder):
    """Sample → the step that trained it, and the version that sampled it."""
    lines = [line for line in ledger(folder) if line["state"] == "trained"]
    assert len(lines) == len({line["sample"] for line in lines})
    return {line["sample"]: (line["step"], line["versions"]["gen"]) for line in lines}


def forget_after(folder, step):
    """What a run looks like that was killed before its next checkpoint."""
    for path in sorted((folder / "checkpoints").glob("step-*"))[step:]:
        shutil.rmtree(path)
    shutil.rmtree(folder / "models", ignore_errors=True)
    (folder / "status.json").write_text(json.dumps({"state": "running", "step": step, "steps": 6}))


@pytest.mark.long
@pytest.mark.parametrize("drops", [(), DROPPING], ids=["plain", "dropping"])
def test_a_resumed_run_trains_on_the_samples_that_were_ready(train, resume, drops):
    _, folder = train(*PLAIN, *drops)
    for step in range(1, 7):
        assert_each_sample_is_in_one_place(folder, step)
    forget_after(folder, 2)
    state = state_of(folder, 2)
    assert state["ready"]
    assert state["returned"]  # those that were being made
    resume()
    for step in range(2, 7):
        assert_each_sample_is_in_one_place(folder, step)
    steps_and_versions = trained(folder)
    assert len(steps_and_versions) == 6 * 8
    assert all(0 <= step - 1 - version <= 2 for step, version in steps_and_versions.values())
    for ready in state["ready"]:
        step, version = steps_and_versions[sample(ready["draw"])]
        assert (step > 2, version) == (True, ready["versions"]["gen"])  # it was not sampled again
    retried = [draw for draw in state["returned"] if draw[2] and sample(draw) in steps_and_versions]
    assert retried
    assert sum(record.get("samples/retried", 0) for record in numbers(folder)) == len(retried)


@pytest.mark.long
def test_one_rank_resumes_with_the_samples_that_two_ranks_made(train, resume):
    _, folder = train(*PLAIN, *TWO_RANKS)
    forget_after(folder, 3)
    state = state_of(folder, 3)
    resume(
        "launch=inline",
        "cluster.devices_per_node=1",
        "models.critic.devices=null",
        "models.reward.devices=null",
    )
    for step in range(3, 7):
        assert_each_sample_is_in_one_place(folder, step)
    steps_and_versions = trained(folder)
    assert len(steps_and_versions) == 6 * 8
    assert all(
        steps_and_versions[sample(ready["draw"])][1] == ready["versions"]["gen"]
        for ready in state["ready"]
    )


def test_samples_too_stale_for_a_resumed_run_are_sampled_again(train, resume):
    _, folder = train(*PLAIN)
    forget_after(folder, 4)
    stale = [
        sample(one["draw"])
        for one in state_of(folder, 4)["ready"]
        if 4 - one["versions"]["gen"] > 1
    ]
    assert stale
    resume("train.max_staleness=1", accept=True)
    steps_and_versions = trained(folder)
    assert_each_sample_is_in_one_place(folder, 6)
    assert all(
        0 <= step - 1 - version <= 1 for step, version in steps_and_versions.values() if step > 4
    )
    assert all(steps_and_versions[id_][1] >= 4 for id_ in stale if id_ in steps_and_versions)
    expired = [record.get("samples/expired", 0) for record in numbers(folder)]
    assert sum(expired[4:]) >= len(stale)


def test_ready_samples_are_sampled_again_when_resuming_at_staleness_0(train, resume):
    _, folder = train(*PLAIN)
    forget_after(folder, 4)
    resume("train.max_staleness=0", "train.prompts_per_draw=null", accept=True)
    steps_and_versions = trained(folder)
    assert_each_sample_is_in_one_place(folder, 6)
    assert all(step - 1 == version for step, version in steps_and_versions.values() if step > 4)


def test_evaluations_and_checkpoints_do_not_drain_the_samples_ahead(train):
    """With both after every step there is no less ahead than without; and an evaluation says of
    which weights it is."""
    _, plain = train(
        "train.max_staleness=1", "train.steps=6", "train.eval.dataset=null", name="plain"
    )
    _, folder = train(
        "train.max_staleness=1",
        "train.steps=6",
        "train.eval.every_steps=1",
        "checkpoint.every_steps=1",
    )
    lags, plain_lags = (
        [step - 1 - version for step, version in trained(one).values()] for one in (folder, plain)
    )
    assert set(lags) == {0, 1}
    assert sum(lags) >= sum(plain_lags)
    assert [record["eval/version"] for record in numbers(folder)] == [0, 1, 2, 3, 4, 5, 6]
    assert all(record["samples/ahead"] for record in numbers(folder)[1:-2])
