"""A warm start that was interrupted continues as it began."""

import os
import signal
import sys

from run_files import numbers

from rlcli.launch import run
from rlcli.launch.stopping import StopSignals
from rlcli.observe.display import PlainDisplay
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
