"""Samples that a call drops: replaced by the next ones, accounted for, and the same on any ranks
and when resumed.

The reward of toy row i at step k is 14 + k + i % 3,
so which rows are dropped depends on the weights.
"""

import json
import sys

import pytest

from rlcli.errors import DataError, ProjectError
from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe

pytestmark = pytest.mark.timeout(420)  # a start on two ranks takes a while on a slow machine

DROP = "graph.score.interface={type: toy_reward, args: {drop: 3}}"
DROPPING = (DROP, "train.eval.dataset=null")


@pytest.fixture
def train(project):
    """Run toy.yaml with overrides; returns the folder."""

    def run(*overrides, name="run"):
        with PlainDisplay(sys.stderr) as display:
            run_recipe(load_recipe("toy.yaml", overrides), project / name, display)
        return project / name

    return run


@pytest.fixture
def resume(project):
    def resumed(*overrides):
        with PlainDisplay(sys.stderr) as display:
            resume_run(project / "run", overrides, display)
        return project / "run"

    return resumed


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def numbers(folder):
    """The records of a run, without what a clock says; `calls` counts the steps of a process."""
    return [
        {
            k: v
            for k, v in record.items()
            if not k.startswith(("time/", "tokens_per_second", "perf/"))
            and not k.endswith("/calls")
        }
        for record in lines(folder, "metrics.jsonl")
    ]


def by_state(folder, state):
    return [line["sample"] for line in lines(folder, "ledger.jsonl") if line["state"] == state]


def test_each_drawn_sample_is_trained_on_once_or_dropped_with_a_reason(train):
    folder = train("train.steps=5", *DROPPING)
    trained, dropped = by_state(folder, "trained"), by_state(folder, "dropped")
    assert len(trained) == 5 * 8
    assert dropped
    assert len({*trained, *dropped}) == len(trained) + len(dropped)
    state = json.loads((folder / "checkpoints/step-000000000005/state.json").read_text())
    assert (state["drawn"], state["samples"], state["returned"]) == (
        len(trained) + len(dropped),
        40,
        [],
    )
    for line in lines(folder, "ledger.jsonl"):
        is_dropped = (14 + line["step"] - 1 + int(line["sample"].partition("r")[2]) % 3) % 3 == 0
        assert line["state"] == ("dropped" if is_dropped else "trained")
        assert (line.get("call"), line.get("reason")) == (
            ("score", "divisible") if is_dropped else (None, None)
        )
    for record in numbers(folder):
        assert record["actor/samples"] == 8
        assert record["samples/drawn"] == 8 + record["samples/dropped"]
        assert (
            record["samples/dropped/divisible"]
            == record["samples/dropped"]
            == record["samples/redrawn"]
        )


def test_a_reward_that_drops_nothing_leaves_the_run_unchanged(train):
    """A reward that could drop samples but drops none gives the same run as one that cannot."""
    plain = train("train.eval.dataset=null", name="plain")
    able = train("train.eval.dataset=null", DROP.replace("3", "1000"), name="able")
    able_numbers = [
        {k: v for k, v in record.items() if not k.startswith("samples/")}
        for record in numbers(able)
    ]
    assert able_numbers == numbers(plain)
    assert (able / "ledger.jsonl").read_text() == (plain / "ledger.jsonl").read_text()


@pytest.mark.long
@pytest.mark.parametrize("per_draw", ["null", "5"])
def test_a_resumed_run_draws_the_same_samples_as_an_uninterrupted_run(train, resume, per_draw):
    settings = (*DROPPING, f"train.prompts_per_draw={per_draw}")
    uninterrupted = train(*settings, "train.steps=5", name="whole")
    train(*settings, "train.steps=2")
    folder = resume("train.steps=5")
    assert numbers(folder) == numbers(uninterrupted)
    assert (folder / "ledger.jsonl").read_text() == (uninterrupted / "ledger.jsonl").read_text()
    assert (folder / "samples.jsonl").read_text() == (uninterrupted / "samples.jsonl").read_text()
    returned = json.loads((uninterrupted / "checkpoints/step-000000000005/state.json").read_text())[
        "returned"
    ]
    assert bool(returned) == (per_draw == "5")


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize("critic", [(), ("models.critic.devices='1'", "models.reward.devices='0'")])
def test_two_ranks_drop_and_draw_the_same_samples_as_one(train, critic):
    settings = (*DROPPING, "train.prompts_per_draw=5")
    one_rank = train(*settings, name="one")
    two_ranks = train(*settings, "launch=local", "cluster.devices_per_node=2", *critic, name="two")
    assert numbers(two_ranks) == numbers(one_rank)
    for name in ("ledger.jsonl", "samples.jsonl"):
        assert (two_ranks / name).read_text() == (one_rank / name).read_text()


def test_a_run_whose_samples_are_all_dropped_ends_with_the_reason(train, project):
    with pytest.raises(
        DataError, match="step 1: a batch needs 8 samples, but none of 24 drawn is left"
    ) as caught:
        train(DROP.replace("3", "1"), "train.max_redraws=2")
    assert (caught.value.code, caught.value.exit_code, caught.value.where) == (
        "F80",
        4,
        "graph.score",
    )
    assert "dropped: score 24 (divisible)" in caught.value.what
    assert by_state(project / "run", "trained") == []


def test_steps_before_an_underfilled_batch_are_kept_and_can_be_resumed(train, resume, project):
    """The second step needs one draw more than the first. With more redraws allowed,
    nothing is lost."""
    settings = (
        "train.eval.dataset=null",
        "graph.score.interface={type: toy_reward, args: {drop: 3}}",
    )
    uninterrupted = train(
        *settings, "train.prompts_per_draw=1", "train.max_redraws=20", name="whole"
    )
    with pytest.raises(DataError, match="step 2: a batch needs 8 samples, but only 7 of"):
        train(*settings, "train.prompts_per_draw=1", "train.max_redraws=12")
    assert numbers(project / "run") == numbers(uninterrupted)[:1]
    folder = resume("train.max_redraws=20")
    assert numbers(folder) == numbers(uninterrupted)
    assert (folder / "ledger.jsonl").read_text() == (uninterrupted / "ledger.jsonl").read_text()


@pytest.mark.parametrize("ahead", [(), ("train.max_staleness=1",)], ids=["", "ahead"])
def test_epochs_cover_all_rows_although_some_are_dropped(train, resume, ahead):
    """Sixty rows are eight steps of eight; a third is dropped.
    The last batch is filled from the next epoch."""
    folder = train("train.steps=null", "train.epochs=3", *DROPPING, *ahead)
    trained, dropped = by_state(folder, "trained"), by_state(folder, "dropped")
    drawn = {*trained, *dropped}
    assert {f"e{epoch}r{row}" for epoch in range(3) for row in range(20)} <= drawn
    beyond = [id_ for id_ in trained if id_.startswith("e3")]
    steps = len(trained) // 8
    assert (len(trained), len(beyond) < 8, steps < 8) == (steps * 8, True, True)
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    assert [record["step"] for record in numbers(folder)] == list(range(1, steps + 1))
    resume("train.epochs=4")
    assert {f"e3r{row}" for row in range(20)} <= {
        *by_state(folder, "trained"),
        *by_state(folder, "dropped"),
    }


def test_an_undeclared_drop_reason_is_an_error_of_the_component(train):
    with pytest.raises(
        ProjectError, match=r"dropped sample row-.* for 'other'; its DROPS declares divisible"
    ) as caught:
        train("graph.score.interface={type: toy_reward, args: {drop: 3, reason: other}}")
    assert caught.value.code == "F54"


def test_an_evaluation_drops_nothing(train):
    plain = train("train.steps=1", name="plain")
    able = train(
        "train.steps=1",
        "train.eval.graph.eval_score.interface={type: toy_reward, args: {drop: 1}}",
        name="able",
    )
    assert numbers(able) == numbers(plain)
