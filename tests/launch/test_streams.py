"""Datasets that do not know how many rows they have: read forward, pass after pass, and resumed
where they were."""

import json

import pytest
from run_files import ledger, numbers

from rlcli.errors import DataError, UsageError

pytestmark = [pytest.mark.timeout(420), pytest.mark.usefixtures("quick_ranks")]

STREAM = ("datasets.train.type=toy_stream", "train.eval.dataset=null")
ROWS = ("train.shuffle=false", "train.eval.dataset=null")
SIX = "train.steps=6"
TWO_RANKS = ("launch=local", "cluster.devices_per_node=2")
DROPPING = ("graph.score.interface={type: toy_reward, args: {drop: 3}}", "train.prompts_per_draw=5")


def outputs(folder):
    """What a run leaves behind: it reads 48 rows of 20."""
    return numbers(folder), ledger(folder), (folder / "samples.jsonl").read_text()


@pytest.mark.long
@pytest.mark.parametrize("settings", [(), DROPPING], ids=["", "dropping"])
def test_a_stream_gives_the_same_run_as_its_rows_in_order(train, resume, settings):
    _, rows = train(*ROWS, *settings, SIX, name="rows")
    _, stream = train(*STREAM, *settings, SIX, name="stream")
    assert outputs(stream) == outputs(rows)
    _, folder = train(*STREAM, *settings, "train.steps=2")  # within the first pass
    resume("train.steps=4")
    resume(SIX)
    assert outputs(folder) == outputs(rows)


def test_two_ranks_read_a_stream_like_one(train):
    _, one_rank = train(*STREAM, SIX, name="one")
    _, two_ranks = train(*STREAM, *TWO_RANKS, SIX, name="two")
    assert outputs(two_ranks) == outputs(one_rank)


def test_a_stream_is_read_once_when_samples_are_made_ahead(train):
    _, folder = train(*STREAM, *DROPPING, SIX, "train.max_staleness=2")
    state = json.loads((folder / "checkpoints/step-000000000006/state.json").read_text())
    places = [line["sample"] for line in ledger(folder)] + [
        f"e{epoch}r{row}" for epoch, row, _ in state["returned"]
    ]
    assert sorted(places) == sorted(
        f"e{position // 20}r{position % 20}" for position in range(state["drawn"])
    )
    assert state["pass_rows"] == 20


@pytest.mark.parametrize(
    ("override", "where"),
    [
        (("datasets.train.type=toy_stream", "train.steps=null", "train.epochs=2"), "train.epochs"),
        (
            ("datasets.train.type=toy_stream", "checkpoint.every_epochs=1"),
            "checkpoint.every_epochs",
        ),
        (("datasets.held_out.type=toy_stream",), "train.eval.dataset"),
    ],
)
def test_a_stream_is_refused_where_the_number_of_rows_must_be_known(
    train, project, override, where
):
    with pytest.raises(UsageError, match="the dataset is a stream") as caught:
        train(*override)
    assert (caught.value.where, caught.value.code) == (where, "R49")
    assert not (project / "run/metrics.jsonl").exists()


def test_passes_of_different_lengths_are_an_error_of_the_dataset(train):
    with pytest.raises(
        DataError, match="dataset train has 18 rows in pass 2, and had 20 in another"
    ):
        train(*STREAM, SIX, "datasets.train.args={rows: 20, fewer: 2}")


def test_a_stream_without_rows_is_refused(train):
    with pytest.raises(DataError, match="dataset train has no rows"):
        train(*STREAM, "datasets.train.args.rows=0")
