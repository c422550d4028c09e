"""Complete runs of the command, as a user types it, on a model small enough for a test."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from toy_project import TINY_PPO
from warm_command import ENVIRONMENT, WarmCommand


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def records(self):
        """metrics.jsonl."""
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]

    @property
    def steps(self):
        return [
            record
            for record in self.records
            if "actor/loss" in record or "actor/grad_norm" in record
        ]

    @property
    def status(self):
        return json.loads((self.folder / "status.json").read_text())


@pytest.fixture(scope="session")
def command():
    """Run the command to its end as a user starts it."""

    def run(*arguments, cwd=None, timeout=300):
        return subprocess.run(
            [sys.executable, "-m", "rlcli", *arguments],
            cwd=cwd,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture(scope="session")
def warm_command():
    """The same in a fork of a process that has loaded everything,
    for runs whose start is not tested."""
    with contextlib.closing(WarmCommand()) as warm:
        yield lambda *arguments, cwd=".", timeout=300: warm.run(
            list(arguments), Path(cwd).resolve(), timeout
        )


@pytest.fixture(scope="session")
def train_into(warm_command):
    """Train into `<home>/<name>`."""

    def run(home, recipe, *overrides, name="run"):
        folder = home / name
        done = warm_command("train", str(recipe), *overrides, "--run-dir", str(folder), cwd=home)
        return Run(done.returncode, done.stdout, done.stderr, folder)

    return run


@pytest.fixture
def train(tmp_path, train_into):
    return functools.partial(train_into, tmp_path)


@pytest.fixture(scope="session")
def tiny_ppo():
    """Overrides that make ppo_math small: no warm start, a toy model,
    two steps of eight prompts."""
    return TINY_PPO
