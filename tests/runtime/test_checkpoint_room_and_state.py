"""The master's side of a checkpoint: the room that it needs,
and a state that can be written down."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest

from rlcli.checkpoint.commit import folder_name
from rlcli.checkpoint.run_state import RunState
from rlcli.errors import ModelError, NumericError, ResourceError
from rlcli.recipe.sections.checkpoint import Checkpoint
from rlcli.runtime.checkpoints import Checkpoints

MIB = 1 << 20


@pytest.fixture
def make(tmp_path):
    """The checkpoints of a run on one rank whose answers are given."""

    def made(settings, answer=None):
        recipe, topology = (
            SimpleNamespace(checkpoint=settings),
            SimpleNamespace(placements=[], world_size=1),
        )

        async def ask(op, args):
            return {0: answer}

        ranks = SimpleNamespace(ask=ask, listen=lambda name, take: None)
        return Checkpoints(
            SimpleNamespace(checkpoints=tmp_path, record=None),
            SimpleNamespace(run_id="run"),
            recipe,
            topology,
            ranks,
            SimpleNamespace(phase=lambda text: None),
        )

    return made


def test_free_space_is_required_for_checkpoints_that_do_not_exist_yet(make, tmp_path, monkeypatch):
    free = [250 * MIB]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    checkpoints = make(Checkpoint(keep_last=2))
    with pytest.raises(
        ResourceError, match="storing 3 checkpoints needs 300 MiB, 250 MiB are free"
    ):
        checkpoints.check_room(100 * MIB)
    for step in (2, 4, 6):
        (tmp_path / folder_name(step)).mkdir()
    free[0] = 100 * MIB
    checkpoints.check_room(100 * MIB)
    free[0] = 99 * MIB
    with pytest.raises(
        ResourceError, match="a checkpoint needs 100 MiB, 99 MiB are free"
    ) as caught:
        checkpoints.check_room(100 * MIB)
    assert caught.value.code == "F28"
    free[0] = 3 << 10
    with pytest.raises(ResourceError, match="a checkpoint needs 5 KiB, 3 KiB are free"):
        checkpoints.check_room(5 << 10)


def test_free_space_is_required_whatever_the_occasion_of_checkpoints_is(make, monkeypatch):
    never = {"at_end": False, "on_stop": False, "every_seconds": None}
    occasions = ({name: True} for name in ("at_end", "on_stop"))
    periods = ({name: 1} for name in ("every_steps", "every_epochs", "every_seconds"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=MIB))
    for occasion in (*occasions, *periods):
        with pytest.raises(ResourceError, match="F28"):
            make(Checkpoint(**never | occasion)).check_room(MIB)
    make(Checkpoint(**never)).check_room(MIB)


def test_a_state_with_a_number_that_is_not_finite_is_an_error_of_the_interface(make):
    checkpoints = make(
        Checkpoint(), {"versions": {}, "interfaces": {"train": {"kl_ctl": float("nan")}}}
    )
    with pytest.raises(
        NumericError, match="the state of step 3 holds a number that is not finite"
    ) as caught:
        asyncio.run(
            checkpoints.take(RunState(step=3, samples=24, drawn=24, datasets={}), {}, lambda: None)
        )
    assert (caught.value.code, caught.value.exit_code) == ("F35", 9)


def test_a_state_from_before_samples_could_be_dropped_is_read(tmp_path):
    fields = {
        "step": 3,
        "samples": 24,
        "datasets": {},
        "versions": {"actor": {"global_step": 3}},
        "interfaces": {},
    }
    (tmp_path / "state.json").write_text(json.dumps({**fields, "nonfinite": [], "format": 1}))
    state = RunState.read(tmp_path)
    assert (state.step, state.samples, state.drawn, state.returned) == (3, 24, 24, [])


def test_a_state_of_a_newer_format_is_refused(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"step": 3, "format": 4}))
    with pytest.raises(ModelError, match="its state has format 4; this rlcli reads 3") as caught:
        RunState.read(tmp_path)
    assert caught.value.code == "F85"
