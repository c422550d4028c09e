"""A project of its own: toy components whose numbers do not depend on who computes what, and a
recipe for them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_ranks import forked_ranks
from toy_project import RECIPE, make_project
from warm_command import load_everything
from warm_processes import warm_processes

from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.processes import die_with_parent
from rlcli.recipe.resolve import load_recipe

HOME = str(Path(__file__).parents[2])

# `nohup make test` ignores it, and so would every process started here
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def components(tmp_path_factory):
    """A user's project with the toy components; one for all tests,
    for a process imports a component once."""
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def project(tmp_path, components, monkeypatch):
    """A working directory with toy.yaml."""
    (tmp_path / "toy.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLCLI_PROJECT", str(components))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def endless(project, forked_processes):
    """Start toy.yaml without an end as a user does, in forks; returns the process once it has done
    a few steps."""
    started = []

    def start(*options, folder="run"):
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rlcli",
                "train",
                "toy.yaml",
                "--run-dir",
                folder,
                "train.steps=100000",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": HOME},
            preexec_fn=die_with_parent,
        )
        started.append(process)
        metrics, deadline = project / folder / "metrics.jsonl", time.monotonic() + 200
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def quick_ranks(project):
    """Ranks are forks, where a test is about what they do;
    torchrun starts them where it is about processes."""
    load_everything()
    with forked_ranks():
        yield


@pytest.fixture
def forked_processes(project):
    """All processes of a run are forks, so that a test may change what they do."""
    load_everything()
    with warm_processes():
        yield


@pytest.fixture
def train(project):
    """Train the toy recipe into a folder of the working directory."""

    def run(*overrides, name="run"):
        with PlainDisplay(sys.stderr) as display:
            return run_recipe(
                load_recipe("toy.yaml", overrides), project / name, display
            ), project / name

    return run


@pytest.fixture
def resume(project):
    """Resume such a run."""

    def run(*overrides, name="run", accept=False):
        with PlainDisplay(sys.stderr) as display:
            return resume_run(project / name, overrides, display, accept_changes=accept)

    return run
