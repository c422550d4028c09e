"""Datasets that do not know how many rows they have: read forward, pass after pass, and resumed where they were."""

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


def left(folder):
    """What a run leaves behind: it reads 48 rows of 20."""
    return numbers(folder), ledger(folder), (folder / "samples.jsonl").read_text()


@pytest.mark.parametrize("more", [(), DROPPING], ids=["", "dropping"])
def test_a_stream_is_as_good_as_its_rows_in_their_order(train, resume, more):
    _, rows = train(*ROWS, *more, SIX, name="rows")
    _, stream = train(*STREAM, *more, SIX, name="stream")
    assert left(stream) == left(rows)
    _, folder = train(*STREAM, *more, "train.steps=2")  # within the first pass
    resume("train.steps=4")
    resume(SIX)
    assert left(folder) == left(rows)


def test_one_rank_reads_and_the_others_are_sent_their_rows(train):
    _, one = train(*STREAM, SIX, name="one")
    _, two = train(*STREAM, *TWO_RANKS, SIX, name="two")
    assert left(two) == left(one)


def test_ahead_of_training_a_stream_is_read_once(train):
    _, folder = train(*STREAM, *DROPPING, SIX, "train.max_staleness=2")
    state = json.loads((folder / "checkpoints/step-000000000006/state.json").read_text())
    places = [line["sample"] for line in ledger(folder)] + [f"e{epoch}r{row}" for epoch, row, _ in state["returned"]]
    assert sorted(places) == sorted(f"e{place // 20}r{place % 20}" for place in range(state["drawn"]))
    assert state["pass_rows"] == 20


@pytest.mark.parametrize(
    ("override", "where"),
    [
        (("datasets.train.type=toy_stream", "train.steps=null", "train.epochs=2"), "train.epochs"),
        (("datasets.train.type=toy_stream", "checkpoint.every_epochs=1"), "checkpoint.every_epochs"),
        (("datasets.held_out.type=toy_stream",), "train.eval.dataset"),
    ],
)
def test_where_the_number_of_rows_must_be_known_a_stream_is_refused(train, project, override, where):
    with pytest.raises(UsageError, match="the dataset is a stream") as caught:
        train(*override)
    assert (caught.value.where, caught.value.code) == (where, "R49")
    assert not (project / "run/metrics.jsonl").exists()


def test_passes_of_different_lengths_are_the_datasets_fault(train):
    with pytest.raises(DataError, match="dataset train has 18 rows in pass 2, and had 20 in another"):
        train(*STREAM, SIX, "datasets.train.args={rows: 20, fewer: 2}")


def test_a_stream_without_rows(train):
    with pytest.raises(DataError, match="dataset train has no rows"):
        train(*STREAM, "datasets.train.args.rows=0")
