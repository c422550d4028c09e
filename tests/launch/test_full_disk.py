"""The lines of a run on a disk that is full for a moment, or to the end."""

import errno
import json
import os
import sys

import pytest

from rlcli.errors import ResourceError
from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe import outputs
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe

FILES = ("metrics.jsonl", "samples.jsonl", "ledger.jsonl")


class Disk:
    """Is full for some of the writes of lines, which are counted from 1;
    each of these tears its line."""

    def __init__(self):
        self.full = range(0)
        self._writes = 0
        self._write = os.write

    def write(self, descriptor, data):
        self._writes += 1
        if self._writes in self.full:
            self._write(descriptor, data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(descriptor, data)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr("rlcli.observe.json_lines.os.write", disk.write)
    monkeypatch.setattr(outputs, "PAUSE", 0.01)
    return disk


def train(folder, *overrides):
    with PlainDisplay(sys.stderr) as display:
        return run_recipe(load_recipe("toy.yaml", ["train.steps=3", *overrides]), folder, display)


def lines(folder):
    """Of each file, without what a clock says."""
    clocks = ("time/", "tokens_per_second", "perf/")
    return {
        name: [
            {
                key: value
                for key, value in json.loads(line).items()
                if not key.startswith(clocks) and not key.endswith("/calls")
            }
            for line in (folder / name).read_text().splitlines()
        ]
        for name in FILES
    }


def test_lines_are_complete_after_the_disk_was_full_for_a_moment(project, disk, capsys):
    assert train(project / "whole").exit_code == 0
    disk._writes, disk.full = 0, range(4, 9)
    assert train(project / "run").exit_code == 0
    assert lines(project / "run") == lines(project / "whole")
    messages = capsys.readouterr().err
    assert "cannot be written now, its lines are kept: No space left on device" in messages
    assert "is being written again" in messages


def test_a_disk_full_to_the_end_commits_no_step_whose_lines_are_lost(project, disk):
    every_step = "checkpoint.every_steps=1"
    train(project / "whole", every_step)
    disk._writes, disk.full = 0, range(9, 10**9)
    with pytest.raises(ResourceError) as caught:
        train(project / "run", every_step)
    assert (caught.value.code, caught.value.exit_code) == ("F28", 6)
    assert json.loads((project / "run/status.json").read_text())["state"] == "failed"
    for name in FILES:
        assert not (project / "run" / name).read_text().rpartition("\n")[2], "no line is torn"
    disk.full = range(0)
    with PlainDisplay(sys.stderr) as display:
        resume_run(project / "run", (), display)
    assert lines(project / "run") == lines(project / "whole")


def test_a_run_without_checkpoints_fails_if_its_last_lines_are_not_written(project, disk):
    disk.full = range(9, 10**9)
    with pytest.raises(
        ResourceError, match=r"lines that are not on disk: .* of metrics\.jsonl"
    ) as caught:
        train(project / "run", "checkpoint.at_end=false", "checkpoint.every_seconds=null")
    assert (caught.value.code, caught.value.exit_code) == ("F28", 6)
    assert json.loads((project / "run/status.json").read_text())["exit_code"] == 6
