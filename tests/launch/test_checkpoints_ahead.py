"""Checkpoints and evaluations while samples are made ahead of training: neither waits for them, and none is lost."""

import json
import shutil

import pytest
from run_files import ledger, numbers

from rlcli.runtime.data_order import DataOrder, training_id

pytestmark = [pytest.mark.timeout(420), pytest.mark.usefixtures("quick_ranks")]

AHEAD = ("train.max_staleness=2", "train.prompts_per_draw=5", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
PLAIN = (*AHEAD, "train.eval.dataset=null", "train.steps=6")
DROPPING = ("graph.score.interface={type: toy_reward, args: {drop: 3}}",)
TWO_RANKS = ("launch=local", "cluster.devices_per_node=2", "models.critic.devices='1'", "models.reward.devices='0'")


def state_of(folder, step):
    return json.loads((folder / f"checkpoints/step-{step:012d}/state.json").read_text())


def sample(draw):
    return training_id(*draw[:2])


def account(folder, step):
    """By the checkpoint of a step, each sample that was drawn is in one place: trained, dropped, waiting or ready."""
    state = state_of(folder, step)
    places = [line["sample"] for line in ledger(folder) if line["step"] <= step]
    places += [sample(draw) for draw in state["returned"]] + [sample(one["draw"]) for one in state["ready"]]
    order = DataOrder(20, seed=5)
    assert sorted(places) == sorted(training_id(*order.at(place)) for place in range(state["drawn"]))


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


@pytest.mark.parametrize("drops", [(), DROPPING], ids=["plain", "dropping"])
def test_a_run_continues_with_the_samples_that_were_finished(train, resume, drops):
    _, folder = train(*PLAIN, *drops)
    for step in range(1, 7):
        account(folder, step)
    forget_after(folder, 2)
    state = state_of(folder, 2)
    assert state["ready"]
    assert state["returned"]  # those that were in the making
    resume()
    for step in range(2, 7):
        account(folder, step)
    found = trained(folder)
    assert len(found) == 6 * 8
    assert all(0 <= step - 1 - version <= 2 for step, version in found.values())
    for one in state["ready"]:
        step, version = found[sample(one["draw"])]
        assert (step > 2, version) == (True, one["versions"]["gen"])  # it was not sampled again
    again = [draw for draw in state["returned"] if draw[2] and sample(draw) in found]
    assert again
    assert sum(record.get("samples/retried", 0) for record in numbers(folder)) == len(again)


def test_what_two_ranks_have_finished_one_rank_continues_with(train, resume):
    _, folder = train(*PLAIN, *TWO_RANKS)
    forget_after(folder, 3)
    state = state_of(folder, 3)
    resume("launch=inline", "cluster.devices_per_node=1", "models.critic.devices=null", "models.reward.devices=null")
    for step in range(3, 7):
        account(folder, step)
    found = trained(folder)
    assert len(found) == 6 * 8
    assert all(found[sample(one["draw"])][1] == one["versions"]["gen"] for one in state["ready"])


def test_a_resumed_run_gives_back_what_is_too_stale_for_it(train, resume):
    _, folder = train(*PLAIN)
    forget_after(folder, 4)
    stale = [sample(one["draw"]) for one in state_of(folder, 4)["ready"] if 4 - one["versions"]["gen"] > 1]
    assert stale
    resume("train.max_staleness=1", accept=True)
    found = trained(folder)
    account(folder, 6)
    assert all(0 <= step - 1 - version <= 1 for step, version in found.values() if step > 4)
    assert all(found[id_][1] >= 4 for id_ in stale if id_ in found)
    expired = [record.get("samples/expired", 0) for record in numbers(folder)]
    assert sum(expired[4:]) >= len(stale)


def test_a_synchronous_run_makes_them_again(train, resume):
    _, folder = train(*PLAIN)
    forget_after(folder, 4)
    resume("train.max_staleness=0", "train.prompts_per_draw=null", accept=True)
    found = trained(folder)
    account(folder, 6)
    assert all(step - 1 == version for step, version in found.values() if step > 4)


def test_evaluations_and_checkpoints_do_not_drain_what_is_ahead(train):
    """With both after every step there is no less ahead than without; and an evaluation says of which weights it is."""
    _, plain = train("train.max_staleness=1", "train.steps=6", "train.eval.dataset=null", name="plain")
    _, folder = train("train.max_staleness=1", "train.steps=6", "train.eval.every_steps=1", "checkpoint.every_steps=1")
    lags, plain_lags = ([step - 1 - version for step, version in trained(one).values()] for one in (folder, plain))
    assert set(lags) == {0, 1}
    assert sum(lags) >= sum(plain_lags)
    assert [record["eval/version"] for record in numbers(folder)] == [0, 1, 2, 3, 4, 5, 6]
    assert all(record["samples/ahead"] for record in numbers(folder)[1:-2])
