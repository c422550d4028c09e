"""A tracker that hangs, dies, is slow or has no disk costs a run one warning, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from run_files import numbers
from tracked_runs import add_steps, make_run, numbers_of, tensorboard_scalars

from rlcli.launch import mirrors
from rlcli.launch.mirrors import MirrorProcess, Mirrors
from rlcli.observe.metrics import read_metrics
from rlcli.processes import start_time

HOME = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(420)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Much time for the last lines, on a machine that is busy with other tests."""
    monkeypatch.setattr(mirrors, "END_WITHIN", 200.0)


class Words:
    """What the run says about its mirrors."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.warning, self.note = self.warnings.append, self.notes.append


@pytest.fixture
def fault(monkeypatch):
    """Lets a mirror fail when it writes."""

    def set_fault(action: str) -> None:
        monkeypatch.setenv("RLCLI_FAILPOINTS", f"tracker.write:{action}")
        monkeypatch.setenv("RLCLI_ENABLE_FAILPOINTS", "1")

    return set_fault


def record_of(folder: Path, name: str = "tensorboard") -> dict:
    return json.loads((folder / "trackers" / f"{name}.json").read_text())


def until(condition, seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def assert_complete(folder: Path) -> None:
    """TensorBoard shows exactly what the run's files say."""
    scalars = sorted(tensorboard_scalars(folder / "tensorboard"))
    expected = sorted(numbers_of(read_metrics(folder / "metrics.jsonl")).items())
    assert [(step, tag) for step, tag, _ in scalars] == [key for key, _ in expected]
    values = [value for *_, value in scalars]
    assert values == pytest.approx([value for _, value in expected], rel=1e-6, nan_ok=True)


def test_a_mirror_follows_a_run_and_has_its_last_lines_at_the_end(tmp_path):
    run, words = make_run(tmp_path / "run", [1]), Words()
    with Mirrors(run.path, ["tensorboard"], words) as running:
        running.start()
        running.start()  # as when workers are started again
        until((run.path / "trackers" / "tensorboard.json").exists)
        add_steps(run.path, [2, 3])
    assert words.warnings == []
    assert_complete(run.path)
    assert record_of(run.path)["closed"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("action", "reason"),
    [("kill", "SIGKILL"), ("ENOSPC", "No space left on device"), ("stop", "SIGKILL")],
)
def test_a_tracker_that_dies_or_hangs_is_one_warning(tmp_path, monkeypatch, fault, action, reason):
    if action == "stop":
        monkeypatch.setattr(mirrors, "END_WITHIN", 0.0)
    fault(f"{action}@1")
    run, words = make_run(tmp_path / "run", [1, 2]), Words()
    with Mirrors(run.path, ["tensorboard"], words) as running:
        running.start()
        until((run.path / "trackers" / "tensorboard.json").exists)
        if action == "stop":  # otherwise the deadline may end it before it has hung
            tracker = psutil.Process(running._running[0]._process.pid)
            until(lambda: tracker.status() == psutil.STATUS_STOPPED)
    (warning,) = words.warnings
    assert warning.startswith("tensorboard does not have all of this run: ")
    assert reason in warning
    assert f"rlcli track {run.path} --to tensorboard" in warning


def test_a_tracker_that_hangs_is_said_while_the_run_goes_on(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(mirrors, "SLOW_AFTER", 0.2)
    monkeypatch.setattr(mirrors, "END_WITHIN", 0.0)
    monkeypatch.setattr(mirrors, "MARGIN", 0.0)
    fault("sleep600")
    run, words = make_run(tmp_path / "run", [1]), Words()
    with Mirrors(run.path, ["tensorboard"], words) as running:
        running.start()
        until(lambda: words.warnings)
    assert len(words.warnings) == 1
    assert "it has not answered for 0.2 s" in words.warnings[0]


def test_a_slow_tracker_gets_many_steps_at_once(tmp_path, fault):
    fault("sleep0.5")
    run, words = make_run(tmp_path / "run", [1]), Words()
    with Mirrors(run.path, ["tensorboard"], words) as running:
        running.start()
        for step in range(2, 40):
            add_steps(run.path, [step])
    assert words.warnings == []
    assert_complete(run.path)


def test_a_tracker_without_its_library_is_one_warning(tmp_path):
    run, words = make_run(tmp_path / "run", [1]), Words()
    with Mirrors(run.path, ["nothing"], words) as running:
        running.start()
        running._running[0].wait(time.monotonic() + 200)
    assert len(words.warnings) == 1
    assert "nothing" in words.warnings[0]


def test_a_mirror_outlives_a_run_that_is_killed_and_has_its_last_lines(tmp_path):
    run = make_run(tmp_path / "run", [1])
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from rlcli.launch.mirrors import MirrorProcess\n"
        "mirror = MirrorProcess(Path(sys.argv[1]), 'tensorboard', print)\n"
        "print(mirror._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "-c", script, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until((run.path / "trackers" / "tensorboard.json").exists)
        add_steps(run.path, [2])
        process.kill()
    until(lambda: record_of(run.path)["closed"])
    assert_complete(run.path)


def test_a_mirror_that_ended_long_ago_leaves_nothing_behind_and_gets_no_signal(
    tmp_path, monkeypatch
):
    """Its number may belong to another program by then."""
    program = tmp_path / "leaves_a_process_behind"
    program.write_text("#!/bin/sh\nsleep 600 >&2 &\necho $! >&2\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    started = MirrorProcess(tmp_path, "tensorboard", Words().warning)
    until(lambda: not started.is_running)
    left_behind = int((tmp_path / "trackers" / "tensorboard.log").read_text())
    until(lambda: start_time(left_behind) is None, 30.0)
    signals = []
    monkeypatch.setattr(os, "killpg", lambda *arguments: signals.append(arguments))
    started.kill()
    assert signals == []


def test_no_word_of_a_run_or_its_secrets_is_an_argument_of_a_mirror(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-7193")
    run = make_run(tmp_path / "run", [1])
    started = MirrorProcess(run.path, "tensorboard", print)
    command = Path(f"/proc/{started._process.pid}/cmdline").read_bytes()
    started.finish()
    started.wait(time.monotonic() + 200)
    assert b"canary" not in command
    written = [file.read_bytes() for file in run.path.rglob("*") if file.is_file()]
    assert all(b"canary" not in content for content in written)


def test_the_steps_of_a_run_do_not_wait_for_a_tracker_that_hangs(train, monkeypatch, fault, capfd):
    """It sleeps for longer than a test may take."""
    monkeypatch.setattr(mirrors, "END_WITHIN", 0.0)
    fault("sleep1000")
    finished, folder = train("log.trackers=[tensorboard]")
    assert (finished.exit_code, finished.steps_done) == (0, finished.steps)
    assert read_metrics(folder / "metrics.jsonl")[-1]["step"] == finished.steps
    assert capfd.readouterr().err.count("does not have all of this run") == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("action", ["kill", "ENOSPC", "stop"])
def test_a_failing_tracker_changes_no_number_and_no_exit_code(
    train, monkeypatch, fault, capfd, action
):
    monkeypatch.setattr(mirrors, "END_WITHIN", 5.0)
    _, without = train(name="without")
    fault(action)
    finished, folder = train("log.trackers=[tensorboard]", name="with")
    assert finished.exit_code == 0
    assert numbers(folder) == numbers(without)
    assert (folder / "samples.jsonl").read_bytes() == (without / "samples.jsonl").read_bytes()
    assert capfd.readouterr().err.count("does not have all of this run") == 1


def _is_written_no_more(file: Path) -> bool:
    before = file.stat().st_size
    time.sleep(1.0)
    return file.stat().st_size == before


@pytest.mark.exhaustive
def test_tensorboard_shows_a_run_that_was_killed_and_resumed_without_gaps(endless, project, resume):
    process = endless("log.trackers=[tensorboard]", "checkpoint.every_steps=3")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: _is_written_no_more(project / "run" / "metrics.jsonl"))
    done = len(read_metrics(project / "run" / "metrics.jsonl"))
    resume(f"train.steps={done + 4}", accept=True)
    assert_complete(project / "run")
