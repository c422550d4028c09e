"""Prompts whose responses all have the same reward are replaced,
the same ones on any number of ranks."""

import json
import runpy
from pathlib import Path

import pytest

KILL_ANYWHERE = runpy.run_path(str(Path(__file__).with_name("kill_anywhere.py")))

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_ranks_and_micro_batches_drop_the_same_prompts(tmp_path, train_into):
    """The reward of a response is whether it ended:
    about half of the prompts have two equal ones."""
    # AdamW divides by the gradient's own size; with its usual epsilon,
    # rounding would move weights like a gradient
    settings = (
        *KILL_ANYWHERE["ALGORITHMS"]["dapo"],
        "log.trackers=[]",
        "log.plot=false",
        "train.steps=2",
        "train.eval.dataset=null",
        "models.actor.backend.args.eps=1e-5",
    )
    variants = {
        "inline": (),
        "micro_batches": ("train.microbatches=3",),
        "two_ranks": ("launch=local", "cluster.devices_per_node=2"),
    }
    runs = {
        name: train_into(tmp_path, *settings, *extra, name=name) for name, extra in variants.items()
    }
    for name, run in runs.items():
        assert run.code == 0, f"{name}: {run.err}"
        assert (run.folder / "ledger.jsonl").read_text() == (
            runs["inline"].folder / "ledger.jsonl"
        ).read_text()
        for ours, theirs in zip(run.steps, runs["inline"].steps, strict=True):
            assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], rel=1e-5, abs=1e-6)
            assert ours["actor/equal_rewards_fraction"] == 0
            assert {key: value for key, value in ours.items() if key.startswith("samples/")} == {
                key: value for key, value in theirs.items() if key.startswith("samples/")
            }
    lines = [
        json.loads(line)
        for line in (runs["inline"].folder / "ledger.jsonl").read_text().splitlines()
    ]
    trained = [line["sample"] for line in lines if line["state"] == "trained"]
    dropped = [line["sample"] for line in lines if line["state"] == "dropped"]
    assert len(trained) == len(set(trained)) == 2 * 4
    assert dropped
    assert not set(trained) & set(dropped)
    assert {line.get("reason") for line in lines} == {None, "equal_rewards"}
