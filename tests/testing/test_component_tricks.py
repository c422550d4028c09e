"""What a component may do to the process that tests it: `rlcli test` neither hangs nor passes, says
in a line what happened, and leaves nothing running."""

import json
import os
import re
import sys
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from forked_ranks import fork, redirect

from rlcli.cli import watched_fork
from rlcli.cli.main import main
from rlcli.processes import start_isolated
from rlcli.testing import runner
from rlcli.testing.process_state import StartedTasks

COMPONENT = """
import os, signal, subprocess, threading, time

import pytest
import torch

from rlcli.api.model import register_interface
from rlcli.interfaces.sft import SFTInterface

{at_import}

@register_interface("tricky")
class Tricky(SFTInterface):
    def train_step(self, *args, **kwargs):
        {in_a_step}
        return super().train_step(*args, **kwargs)
"""
SWALLOW = """
        while True:
            try:
                time.sleep(1)
            except BaseException:
                pass
"""
FORKS = """
        while True:
            if os.fork() == 0:
                time.sleep(1000)
"""
DAEMON = """
        child = os.fork()
        if not child:
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(100)
        os.waitpid(child, 0)
"""
WORDS = "the loss among them"
"""Selects one check that makes steps."""


class Outcome:
    def __init__(self, code, out, err, seconds):
        self.code, self.out, self.err, self.seconds = code, out, err, seconds
        self.words = " ".join((out + err).split())


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """The outcome of `rlcli test` for an interface that does this, in a process of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watched_fork, "GRACE", 2.0)
    monkeypatch.setattr(watched_fork, "END_WITHIN", 2.0)
    monkeypatch.setattr(watched_fork, "MOST_PROCESSES", 30)
    monkeypatch.setattr(runner, "LOADING_SECONDS", 20.0)
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "interfaces").mkdir()

    def run(*options, at_import="", in_a_step="pass"):
        Path("interfaces/tricky.py").write_text(
            COMPONENT.format(at_import=at_import, in_a_step=in_a_step)
        )
        monkeypatch.setattr(
            sys, "argv", ["rlcli", "test", "interface", "tricky", "-k", WORDS, *options]
        )

        def work():
            redirect(1, "out")
            redirect(2, "err")
            main()

        began = time.monotonic()
        _, status = os.waitpid(fork(work), 0)
        code = os.waitstatus_to_exitcode(status)
        out, err = Path("out").read_text(), Path("err").read_text()
        return Outcome(code, out, err, time.monotonic() - began)

    return run


def test_an_ordinary_component_passes(examine):
    outcome = examine()
    assert outcome.code == 0, outcome.words
    assert "1 passed" in outcome.words


@pytest.mark.long
@pytest.mark.parametrize(
    ("trick", "says"),
    [
        ("os.chdir('/')", r"it changes the whole process: working directory \S+ → /"),
        ("os.umask(0)", "it changes the whole process: umask"),
        ("os.environ['TRICK'] = '1'", "it changes the whole process: environment variable TRICK"),
        (
            "torch.set_default_dtype(torch.float64)",
            "it changes the whole process: default dtype torch.float32 → torch.float64",
        ),
        ("torch.set_grad_enabled(False)", "it changes the whole process: gradients True → False"),
        ("pytest.skip('not today')", "the component skipped the check: not today"),
        (
            "threading.Thread(target=time.sleep, args=(100,), name='lasting').start()",
            "left running: thread lasting",
        ),
        ("subprocess.Popen(['sleep', '77'])", r"left running: process sleep 77 \(\d+\)"),
    ],
    ids=["directory", "umask", "variable", "dtype", "gradients", "skip", "thread", "process"],
)
def test_what_a_step_changes_or_leaves_behind_fails_a_check(examine, trick, says):
    outcome = examine(in_a_step=trick)
    assert outcome.code == 1, outcome.words
    assert re.search(says, outcome.words), outcome.words


@pytest.mark.long
@pytest.mark.parametrize(
    ("trick", "options", "code", "says"),
    [
        (SWALLOW, ("--timeout", "1"), 8, r"error\[HANG\]: not done in time.* at \S+tricky.py:1\d"),
        (FORKS, (), 7, r"error\[F01\]: \d+ processes are running during: interface tricky: stats"),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            (),
            7,
            r"error\[F01\]: the command was killed by SIGTERM during: interface tricky: stats",
        ),
        ("os._exit(0)", (), 7, r"the command ended with exit code 0 during: interface tricky"),
    ],
    ids=["swallows", "forks", "terminates", "exits"],
)
def test_a_step_that_never_ends_or_ends_the_command_is_named(examine, trick, options, code, says):
    outcome = examine(*options, in_a_step=trick)
    assert outcome.code == code, outcome.words
    assert re.search(says, outcome.words), outcome.words
    assert outcome.seconds < 60


@pytest.mark.long
def test_a_process_that_leaves_its_parents_is_found(examine):
    outcome = examine(in_a_step=DAEMON)
    assert outcome.code == 7, outcome.words
    assert re.search(r"error\[F01\]: the command left \d+ process(es)? running", outcome.words)


@pytest.mark.long
@pytest.mark.parametrize(
    ("trick", "seconds", "code", "says"),
    [
        ("while True: time.sleep(1)", 1.0, 2, "loading interface tricky is not done after 1 s"),
        (dedent(SWALLOW), 1.0, 8, "not done in time.*: loading interface tricky"),
        ("pytest.skip('not today')", 20.0, 2, "loading interface tricky calls pytest.skip: not"),
        ("os.chdir('/')", 20.0, 2, "loading interface tricky changes the whole process: working"),
    ],
    ids=["hangs", "swallows", "skips", "changes directory"],
)
def test_a_file_that_hangs_skips_or_changes_the_process_is_named(
    examine, monkeypatch, trick, seconds, code, says
):
    monkeypatch.setattr(runner, "LOADING_SECONDS", seconds)
    outcome = examine(at_import=trick)
    assert outcome.code == code, outcome.words
    assert re.search(says, outcome.words), outcome.words


def test_what_a_component_prints_does_not_break_json(examine):
    outcome = examine(
        "--json", at_import="print('hello', flush=True)", in_a_step="os.write(1, b'hello')"
    )
    assert outcome.code == 0, outcome.words
    assert json.loads(outcome.out)["ok"] is True
    assert "hello" in outcome.err


@pytest.mark.long
def test_nothing_is_left_running(examine):
    before = set(psutil.Process().children(recursive=True))
    examine(in_a_step=FORKS)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_an_isolated_process_is_not_left_running():
    before = StartedTasks.now()
    process = start_isolated(["sleep", "100"])
    try:
        assert psutil.Process().children()
        assert StartedTasks.now().left_since(before) == ""
    finally:
        process.kill()
        process.communicate()
