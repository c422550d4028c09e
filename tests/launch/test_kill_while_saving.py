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
    clocks = ("time/", "tokens_per_second", "perf/")
    numbers = [
        {
            key: value
            for key, value in line.items()
            if not key.startswith(clocks) and not key.endswith("/calls")
        }
        for line in lines
    ]
    return numbers, (folder / "ledger.jsonl").read_text(), (folder / "samples.jsonl").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_killed_at_any_failpoint_of_a_save_resumes_identically(
    train_with_faults, project, asynchronous
):
    settings = () if asynchronous else (SYNCHRONOUS,)
    train(project / "whole", *settings)
    ended, failpoints = train_with_faults(project / "noted", "*:note", *settings)
    assert ended == 0
    starts = [
        number
        for number, failpoint in enumerate(failpoints)
        if failpoint["failpoint"] == "checkpoint.begun"
    ]
    assert len(starts) == 4
    third_save = range(starts[2], starts[3])
    assert {failpoints[number]["failpoint"].partition(".")[2] for number in third_save} == {
        "begun",
        "sealed",
        "synced",
        "appeared",
        "committed",
        "doomed",
    }
    for number in third_save:
        folder = project / f"run{number}"
        ended, events = train_with_faults(folder, f"*:kill@{number + 1}", *settings)
        assert (ended, len(events)) == (-9, 1)
        assert newest_verified(folder / "checkpoints")[0].manifest.step in (2, 3)
        with PlainDisplay(sys.stderr) as display:
            resume_run(folder, (), display)
        assert result(folder) == result(project / "whole"), events
        assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
            "LATEST.json",
            "step-000000000004",
        ]
