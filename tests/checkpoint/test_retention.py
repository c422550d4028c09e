"""Which checkpoints are kept: properties that hold after any sequence of saves, prunes,
kills and damage."""

from __future__ import annotations

import os
import runpy
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.checkpoint.commit import begin, remove
from rlcli.checkpoint.retention import Best, prune, strangers
from rlcli.checkpoint.verify import belongs, checkpoints_in, examine, newest_verified, verify
from rlcli.errors import ModelError

one_save = runpy.run_path(str(Path(__file__).with_name("one_save.py")))
save, RUN = one_save["save"], one_save["RUN"]


def steps(folder: Path) -> list[int]:
    return [int(path.name[-12:]) for path in checkpoints_in(folder)]


def damage(checkpoint: Path, how: str) -> None:
    file = checkpoint / "state.json"
    if how == "flip":  # only its digest tells
        content = bytearray(file.read_bytes())
        content[5] ^= 1
        file.write_bytes(content)
    elif how == "cut":
        os.truncate(file, 1)
    else:
        (checkpoint / "MANIFEST.json").unlink()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def test_the_newest_checkpoints_are_kept(folder):
    for step in range(1, 8):
        save(folder, step)
    deleted = prune(folder, keep_last=2)
    assert [int(path.name[-12:]) for path in deleted] == [5, 4, 3, 2, 1]
    assert steps(folder) == [7, 6]


def test_a_dry_run_deletes_nothing(folder):
    for step in (1, 2, 3):
        save(folder, step)
    begin(folder, 4, RUN)
    before = sorted(folder.rglob("*"))
    assert len(prune(folder, keep_last=1, dry_run=True)) == 2
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("which", "expected"), [("highest", [6, 5, 2]), ("lowest", [6, 3, 1])])
def test_the_best_checkpoints_are_kept_in_addition_to_the_newest(folder, which, expected):
    for step, value in enumerate([0.1, 0.9, 0.1, 0.5, 0.9, 0.3], start=1):
        save(folder, step, metrics={"eval/accuracy": value})
    prune(folder, keep_last=1, keep_best=Best("eval/accuracy", which, 2))
    assert steps(folder) == expected


def test_checkpoints_without_the_metric_are_never_the_best(folder):
    save(folder, 1, metrics={"eval/accuracy": -5.0})
    save(folder, 2, metrics={"eval/accuracy": float("nan")})
    for step in (3, 4):
        save(folder, step)
    prune(folder, keep_last=1, keep_best=Best("eval/accuracy", "highest", 2))
    assert steps(folder) == [4, 1]


def test_the_checkpoint_that_latest_names_is_kept(folder):
    for step in (1, 2, 3):
        save(folder, step)
    (folder / "LATEST.json").write_text('{"checkpoint": "step-000000000001"}')
    prune(folder, keep_last=1)
    assert steps(folder) == [3, 1]


@pytest.mark.parametrize("how", ["flip", "cut", "manifest"])
def test_damaged_checkpoints_do_not_count_as_kept(folder, how):
    for step in (1, 2, 3, 4):
        save(folder, step)
    for step in (3, 4):
        damage(folder / f"step-{step:012d}", how)
    prune(folder, keep_last=1)
    assert newest_verified(folder)[0].manifest.step == 2


def test_nothing_is_deleted_if_all_checkpoints_are_damaged(folder):
    for step in (1, 2, 3):
        damage(save(folder, step), "flip")
    assert prune(folder, keep_last=1) == []
    assert steps(folder) == [3, 2, 1]


def test_a_damaged_checkpoint_is_deleted_after_resuming_from_an_older_one(folder):
    """A run that resumed from step 2 saves step 3, so that the damaged step 9 is obsolete."""
    for step in (1, 2, 9):
        save(folder, step)
    damage(folder / "step-000000000009", "flip")
    save(folder, 3, keep_last=2)
    assert steps(folder) == [3, 2]


def test_only_checkpoints_of_the_run_are_deleted(folder, tmp_path):
    """Folders, links and files with names of checkpoints, and copied checkpoints of other runs."""
    elsewhere = tmp_path / "elsewhere"
    unrelated = {f"step-{number:012d}" for number in range(1, 6)}
    save(elsewhere, 1)
    folder.mkdir()
    (folder / "step-000000000001").mkdir()
    (folder / "step-000000000001" / "precious").touch()
    (folder / "step-000000000002").symlink_to(elsewhere / "step-000000000001")
    (folder / "step-000000000003").write_text("precious")
    save(folder, 4, run_id="00" * 16)
    # its manifest says step 1
    shutil.copytree(elsewhere / "step-000000000001", folder / "step-000000000005")
    (folder / "notes.txt").touch()
    for step in (6, 7, 8):
        save(folder, step, keep_last=1)
    assert {path.name for path in strangers(folder, RUN)} == unrelated | {"notes.txt"}
    assert {path.name for path in folder.iterdir()} == unrelated | {
        "notes.txt",
        "step-000000000008",
        "LATEST.json",
    }
    assert verify(elsewhere / "step-000000000001").manifest.step == 1


actions = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 4), st.floats(0, 1), st.integers(1, 3)),
    st.tuples(st.just("prune"), st.integers(1, 3), st.integers(0, 2)),
    st.tuples(st.just("damage"), st.sampled_from(["flip", "cut", "manifest"]), st.integers(0, 5)),
    st.tuples(st.just("die while saving"), st.integers(1, 4)),
    st.tuples(st.just("die while deleting"), st.integers(0, 5)),
)


@given(st.lists(actions, max_size=12))
def test_the_last_valid_checkpoint_is_always_kept(sequence):
    """If a checkpoint is valid before saving or pruning, one at least as new is valid afterwards,
    and the number of checkpoints is bounded by the settings."""
    home = Path(tempfile.mkdtemp())
    folder, step = home / "c", 0
    try:
        for kind, *values in sequence:
            before, _ = newest_verified(folder)
            if kind == "save":
                # a run resumes from the last valid one
                step = (before.manifest.step if before else 0) + values[0]
                save(folder, step, metrics={"m": values[1]}, keep_last=values[2])
                after, rejected = newest_verified(folder)
                unknown = [
                    path
                    for path in checkpoints_in(folder)
                    if not belongs(path, RUN) and path > after.path
                ]
                assert after.manifest.step == step
                assert len(rejected) == len(unknown)  # what may not belong to the run is kept
                assert (
                    len([path for path in checkpoints_in(folder) if belongs(path, RUN)])
                    <= values[2]
                )
                assert {path.name[:5] for path in folder.iterdir()} <= {"step-", "LATES"}
            elif kind == "prune":
                keep, best = values
                deleted = prune(folder, keep, Best("m", "highest", best) if best else None)
                after, _ = newest_verified(folder)
                assert (before is None) == (after is None)
                assert before is None or after.path == before.path
                assert before is not None or not deleted
                assert not set(deleted) & set(checkpoints_in(folder))
                assert (
                    len(
                        [
                            path
                            for path in checkpoints_in(folder)
                            if not examine(path, read=False).faults
                        ]
                    )
                    <= keep + best + 2
                )
            elif kind == "die while saving":
                (begin(folder, step + values[0], RUN) / "state.json").write_text("{")
            elif existing := checkpoints_in(folder):
                path = existing[values[-1] % len(existing)]
                if kind == "damage":
                    _damage_if_valid(path, values[0])
                elif before is None or path != before.path:
                    _die_while_deleting(path)
    finally:
        shutil.rmtree(home)


def _damage_if_valid(path: Path, how: str) -> None:
    if not examine(path).faults:
        damage(path, how)


def _die_while_deleting(path: Path) -> None:
    doomed = path.rename(path.with_name(f".del-{RUN}-{path.name}-{path.stat().st_ino}"))
    next(doomed.glob("*.json")).unlink(missing_ok=True)


def test_removing_a_missing_checkpoint_is_an_error(folder):
    with pytest.raises(Exception, match="No such file") as caught:
        remove(folder / "step-000000000001", RUN)
    assert not isinstance(caught.value, ModelError)
