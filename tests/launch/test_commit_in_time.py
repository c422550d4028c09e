"""A checkpoint is committed as soon as its files are safe, whatever the workers compute and however the run ends."""

import contextlib
import sys
import threading
import time

import pytest

from rlcli.checkpoint.verify import newest_verified
from rlcli.errors import DataError, NumericError, WorkerError
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime import master

pytestmark = pytest.mark.timeout(300)

EVERY_STEP = ("checkpoint.every_steps=1", "train.eval.every_steps=null", "train.steps=2")
LAUNCHES = {"inline": (), "two ranks": ("launch=local", "cluster.devices_per_node=2")}
launches = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
TRAIN = "toy"


@pytest.fixture
def folder(project):
    return project / "run"


@pytest.fixture
def train(folder):
    def run(*overrides):
        with PlainDisplay(sys.stderr) as display:
            run_recipe(load_recipe("toy.yaml", [*EVERY_STEP, *overrides]), folder, display)

    return run


def slow(seconds):
    """The files of a checkpoint are safe this many seconds after it was begun."""
    return f"models.actor.backend={{type: toy, args: {{slow: {seconds}}}}}"


def committed(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


@contextlib.contextmanager
def watched(checkpoint):
    """Notes when a checkpoint appears: [seconds since 1970]."""
    seen, ended = [], threading.Event()

    def watch():
        while not ended.wait(0.02) and not seen:
            if checkpoint.exists():
                seen.append(time.time())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@launches
def test_while_a_call_is_under_way(train, folder, launch):
    first = folder / "checkpoints/step-000000000001"
    with watched(first) as seen:
        train(*launch, f"{TRAIN}.nap=4.0", slow(1.0))
    files = [file for file in first.rglob("*") if file.is_file() and file.name != "MANIFEST.json"]
    safe = max(file.stat().st_mtime for file in files)
    assert seen[0] - safe < 2.0  # the call ends three seconds after them
    assert committed(folder) == [1, 2]


@launches
def test_before_an_error_ends_the_run(train, folder, launch, capsys):
    with pytest.raises(DataError, match="a row that nobody can train on"):
        train(*launch, f"{TRAIN}.nap=2.0", slow(1.0), f"{TRAIN}.fail_rank=0")
    assert newest_verified(folder / "checkpoints")[0].manifest.step == 1
    assert "the last checkpoint is that of step 1" in capsys.readouterr().err


@launches
def test_an_error_waits_for_files_that_are_nearly_written(train, folder, launch):
    with pytest.raises(DataError):
        train(*launch, slow(1.5), f"{TRAIN}.fail_rank=0")
    assert newest_verified(folder / "checkpoints")[0].manifest.step == 1


def test_an_error_does_not_wait_forever(train, folder, monkeypatch, capsys):
    monkeypatch.setattr(master, "LAST_WAIT", 0.2)
    began = time.monotonic()
    with pytest.raises(DataError):
        train(slow(3), f"{TRAIN}.fail_rank=0")
    assert "step 1 was not committed: its files are not complete" in capsys.readouterr().err
    time.sleep(max(0.0, began + 6 - time.monotonic()))  # the thread ends some time: nobody takes its report any more
    assert committed(folder) == []


def test_before_a_dead_rank_ends_the_run(train, folder):
    with pytest.raises(WorkerError):
        train(*LAUNCHES["two ranks"], f"{TRAIN}.kill_rank=1", f"{TRAIN}.nap=3.0", slow(1.0))
    assert newest_verified(folder / "checkpoints")[0].manifest.step == 1


def test_before_a_streak_of_bad_steps_ends_the_run(train, folder):
    with pytest.raises(NumericError) as caught:
        train(f"{TRAIN}.poison=true", "train.max_nonfinite_streak=2", slow(1.0))
    assert caught.value.code == "F37"
    assert newest_verified(folder / "checkpoints")[0].manifest.step == 1
