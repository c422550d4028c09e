"""Runs whose disk fails while a checkpoint is written: training continues,
as many times as the recipe allows."""

import json
import shutil
import sys

import pytest

from rlcli.checkpoint.verify import newest_verified
from rlcli.errors import ModelError, ResourceError, UsageError
from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe

EVERY_STEP = ("checkpoint.every_steps=1", "checkpoint.asynchronous=false", "train.steps=4")


@pytest.fixture
def train(project, monkeypatch):
    """Run the toy recipe with faults: (exit code, the run's folder, the faults that happened)."""
    log = project / "events.jsonl"
    monkeypatch.setenv("RLCLI_ENABLE_FAILPOINTS", "1")
    monkeypatch.setenv("RLCLI_FAILPOINT_EVENTS", str(log))

    def run(faults, *overrides):
        # passages are counted for each text
        monkeypatch.setenv("RLCLI_FAILPOINTS", f"{faults};{project.name}:note")
        with PlainDisplay(sys.stderr) as display:
            finished = run_recipe(
                load_recipe("toy.yaml", [*EVERY_STEP, *overrides]), project / "run", display
            )
        return (
            finished.exit_code,
            project / "run",
            [json.loads(line) for line in log.read_text().splitlines()],
        )

    return run


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("ENOSPC", "F28", "No space left"),
        ("EDQUOT", "F76", "quota"),
        ("EIO", "F29", "Input/output"),
    ],
)
def test_a_failed_save_costs_one_checkpoint(train, capsys, fault, code, says):
    exit_code, folder, events = train(f"checkpoint.sealed:{fault}@5")
    assert (exit_code, len(events)) == (0, 1)
    warnings = [line for line in capsys.readouterr().err.splitlines() if f"[{code}]" in line]
    assert len(warnings) == 1
    assert says in warnings[0]
    assert "(1 of 2)" in warnings[0]
    assert newest_verified(folder / "checkpoints")[0].manifest.step == 4
    assert not list((folder / "checkpoints").glob(".tmp-*"))


def test_a_run_ends_when_saves_fail_too_often(train, project, capsys):
    with pytest.raises(ResourceError) as caught:
        train("checkpoint.begun:ENOSPC@2-9", "checkpoint.max_failed_saves=1")
    assert caught.value.code == "F28"
    assert caught.value.exit_code == 6
    assert "the last one is of step 1" in caught.value.what
    assert "(1 of 1)" in capsys.readouterr().err
    assert newest_verified(project / "run/checkpoints")[0].manifest.step == 1


def test_an_old_checkpoint_that_cannot_be_deleted_is_only_a_warning(train, capsys):
    exit_code, folder, events = train("checkpoint.doomed:EIO@1", "checkpoint.keep_last=1")
    assert (exit_code, len(events)) == (0, 1)
    assert "old checkpoints could not be removed" in capsys.readouterr().err
    assert [path.name for path in (folder / "checkpoints").glob("*step*")] == ["step-000000000004"]


def test_failpoints_left_in_the_environment_are_refused_before_start(
    train, monkeypatch, project, capsys
):
    monkeypatch.setenv("RLCLI_ENABLE_FAILPOINTS", "0")
    with pytest.raises(UsageError, match="would fail on purpose"):
        train("checkpoint.begun:kill")
    assert not (project / "run/metrics.jsonl").exists()
    assert "loading" not in capsys.readouterr().err


def test_a_dangling_link_for_checkpoints_is_reported_before_resuming(project, capsys):
    """`checkpoints` may be a link to a larger disk."""
    with PlainDisplay(sys.stderr) as display:
        run_recipe(load_recipe("toy.yaml", ["train.steps=1"]), project / "run", display)
    before = (project / "run/metrics.jsonl").read_bytes()
    shutil.rmtree(project / "run/checkpoints")
    (project / "run/checkpoints").symlink_to("/nowhere/large-disk")
    with pytest.raises(ResourceError) as caught, PlainDisplay(sys.stderr) as display:
        resume_run(project / "run", ("train.steps=2",), display)
    assert caught.value.where.startswith(str(project / "run/checkpoints"))
    assert (project / "run/metrics.jsonl").read_bytes() == before


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(project, capsys):
    with PlainDisplay(sys.stderr) as display:
        run_recipe(
            load_recipe("toy.yaml", ["train.steps=2", "checkpoint.every_steps=1"]),
            project / "run",
            display,
        )
    before = (project / "run/metrics.jsonl").read_bytes()
    for manifest in (project / "run/checkpoints").glob("*/MANIFEST.json"):
        manifest.write_text("{}")
    with pytest.raises(ModelError) as caught, PlainDisplay(sys.stderr) as display:
        resume_run(project / "run", ("train.steps=3",), display)
    assert (caught.value.code, caught.value.exit_code) == ("F19", 5)
    assert capsys.readouterr().err.count("[F19]") == 2
    assert (project / "run/metrics.jsonl").read_bytes() == before
