"""A run that is killed at any point of a save, and resumed, is the run that was never killed."""

import json
import os
import sys

import pytest

from rlcli.checkpoint.verify import newest_verified
from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe

SETTINGS = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "train.steps=4")
SYNCHRONOUS = "checkpoint.asynchronous=false"


def train(folder, *overrides):
    with PlainDisplay(sys.stderr) as display:
        run_recipe(load_recipe("toy.yaml", [*SETTINGS, *overrides]), folder, display)


@pytest.fixture
def train_with_faults(project, monkeypatch):
    """Train in a process of its own: (how it ended, the faults that happened)."""

    def run(folder, faults, *overrides):
        log = folder.with_suffix(".jsonl")
        monkeypatch.setenv("RLCLI_ENABLE_FAILPOINTS", "1")
        monkeypatch.setenv("RLCLI_FAILPOINT_EVENTS", str(log))
        monkeypatch.setenv("RLCLI_FAILPOINTS", f"{faults};{folder.name}.{project.name}:note")
        pid = os.fork()
        if not pid:
            try:
                train(folder, *overrides)
                os._exit(0)
            finally:
                os._exit(1)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        monkeypatch.delenv("RLCLI_FAILPOINTS")
        return ended, [json.loads(line) for line in log.read_text().splitlines()]

    return run


def result(folder):
    """All that must be alike, but for what a clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "tokens_per_second")
    numbers = [
        {key: value for key, value in line.items() if not key.startswith(clocks) and not key.endswith("/calls")}
        for line in lines
    ]
    return numbers, (folder / "ledger.jsonl").read_text(), (folder / "samples.jsonl").read_text()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_killed_at_every_failpoint_of_a_save(train_with_faults, project, asynchronous):
    settings = () if asynchronous else (SYNCHRONOUS,)
    train(project / "whole", *settings)
    ended, places = train_with_faults(project / "noted", "*:note", *settings)
    assert ended == 0
    begun = [number for number, place in enumerate(places) if place["failpoint"] == "checkpoint.begun"]
    assert len(begun) == 4
    third = range(begun[2], begun[3])
    assert {place["failpoint"].partition(".")[2] for place in (places[number] for number in third)} == {
        "begun", "sealed", "synced", "appeared", "committed", "doomed",
    }  # fmt: skip
    for number in third:
        folder = project / f"run{number}"
        ended, events = train_with_faults(folder, f"*:kill@{number + 1}", *settings)
        assert (ended, len(events)) == (-9, 1)
        assert newest_verified(folder / "checkpoints")[0].manifest.step in (2, 3)
        with PlainDisplay(sys.stderr) as display:
            resume_run(folder, (), display)
        assert result(folder) == result(project / "whole"), events
        assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
            "LATEST.json", "step-000000000004",
        ]  # fmt: skip
