"""A checkpoint is committed as soon as its files are safe,
whatever the workers compute and however the run ends."""

import sys
import time

import pytest

from rlcli.checkpoint.verify import newest_verified
from rlcli.errors import DataError, NumericError, WorkerError
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime import master

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("quick_ranks")]

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
    return sorted(
        int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")
    )


@pytest.fixture
def until_committed(folder):
    """The second training step lasts until the checkpoint of the first is committed; it fails if
    that never happens."""
    return f"{TRAIN}.until={folder / 'checkpoints/step-000000000001'}"


@pytest.mark.long
@launches
def test_a_checkpoint_is_committed_while_a_call_is_running(train, folder, launch, until_committed):
    train(*launch, until_committed, slow(1.0))
    assert committed(folder) == [1, 2]


@pytest.mark.long
@launches
def test_a_checkpoint_is_committed_before_an_error_ends_the_run(
    train, folder, launch, until_committed, capsys
):
    with pytest.raises(DataError, match="a row that nobody can train on"):
        train(*launch, until_committed, slow(1.0), f"{TRAIN}.fail_rank=0")
    assert newest_verified(folder / "checkpoints")[0].manifest.step == 1
    assert "the last checkpoint is that of step 1" in capsys.readouterr().err


@pytest.mark.long
@launches
def test_an_error_waits_for_files_that_are_nearly_complete(train, folder, launch):
    with pytest.raises(DataError):
        train(*launch, slow(1.5), f"{TRAIN}.fail_rank=0")
    assert newest_verified(folder / "checkpoints")[0].manifest.step == 1


@pytest.mark.long
def test_an_error_gives_up_on_files_that_take_too_long(train, folder, monkeypatch, capsys):
    monkeypatch.setattr(master, "LAST_WAIT", 0.2)
    began = time.monotonic()
    with pytest.raises(DataError):
        train(slow(3), f"{TRAIN}.fail_rank=0")
    assert "step 1 was not committed: its files are not complete" in capsys.readouterr().err
    # the thread ends some time: nobody takes its report any more
    time.sleep(max(0.0, began + 6 - time.monotonic()))
    assert committed(folder) == []


@pytest.mark.long
def test_a_checkpoint_is_committed_before_a_dead_rank_ends_the_run(train, folder, until_committed):
    with pytest.raises(WorkerError):
        train(*LAUNCHES["two ranks"], until_committed, f"{TRAIN}.kill_rank=1", slow(1.0))
    assert newest_verified(folder / "checkpoints")[0].manifest.step == 1


def test_a_checkpoint_is_committed_before_nonfinite_steps_end_the_run(train, folder):
    with pytest.raises(NumericError) as caught:
        train(f"{TRAIN}.poison=true", "train.max_nonfinite_streak=2", slow(1.0))
    assert caught.value.code == "F37"
    assert newest_verified(folder / "checkpoints")[0].manifest.step == 1
