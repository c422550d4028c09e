"""A warm start that was interrupted continues as it began."""

import json
import os
import shutil
import signal
import sys

import pytest
from run_files import numbers

from rlcli.errors import Stopped
from rlcli.launch import run
from rlcli.launch.stopping import StopSignals
from rlcli.observe.display import PlainDisplay
from rlcli.observe.results import find_interrupted
from rlcli.recipe.resolve import load_recipe


def test_a_warm_start_keeps_what_it_measured_at_its_first_start(train, project, monkeypatch):
    monkeypatch.setenv("TOY_SECONDS", '{"walk": 3.0, "run": 2.0}')
    _, uninterrupted = train("train.steps=3", name="whole")
    with monkeypatch.context() as patched:
        patched.setattr(PlainDisplay, "step", lambda self, _: os.kill(os.getpid(), signal.SIGTERM))
        stopped, folder = train("train.steps=3", name="runs/toy/first")
    assert stopped.exit_code == 75
    monkeypatch.setenv("TOY_SECONDS", '{"walk": 2.0, "run": 3.0}')
    resolved = load_recipe("toy.yaml", ["train.steps=3"])
    with PlainDisplay(sys.stderr) as display, StopSignals(display.warning) as stop:
        finished = run._run_first(resolved, resolved.recipe, "runs", display, stop)
    assert (finished.began_after, finished.steps_done) == (1, 3)
    assert numbers(folder) == numbers(uninterrupted)
    backend = load_recipe(str(folder / "recipe.resolved.yaml")).recipe.models["actor"].backend
    assert backend.args["pace"] == "run"


def test_a_warm_start_that_was_stopped_at_once_continues_from_its_checkpoint(train, monkeypatch):
    """As `rlcli stop --now` does it."""

    def stop_twice(display, record):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    settings = ("train.steps=3", "checkpoint={every_steps: 1, asynchronous: false}")
    with monkeypatch.context() as patched:
        patched.setattr(
            PlainDisplay, "step", lambda *_: patched.setattr(PlainDisplay, "step", stop_twice)
        )
        with pytest.raises(Stopped) as stopped:
            train(*settings, name="runs/toy/first")
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    resolved = load_recipe("toy.yaml", settings)
    with PlainDisplay(sys.stderr) as display, StopSignals(display.warning) as stop:
        finished = run._run_first(resolved, resolved.recipe, "runs", display, stop)
    assert (finished.began_after, finished.steps_done) == (1, 3)


def test_an_interrupted_run_without_a_checkpoint_does_not_hide_an_older_one(train, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(PlainDisplay, "step", lambda self, _: os.kill(os.getpid(), signal.SIGTERM))
        _, folder = train("train.steps=3", name="runs/toy/first")
    later = folder.with_name("later")
    shutil.copytree(folder, later)
    committed = json.loads((later / "committed.json").read_text())
    (later / "committed.json").write_text(json.dumps(committed | {"step": None}))
    interrupted = find_interrupted(load_recipe("toy.yaml", ["train.steps=3"]), "runs")
    assert interrupted is not None
    assert interrupted.name == "first"
