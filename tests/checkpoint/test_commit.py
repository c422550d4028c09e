"""Saving a checkpoint: what appears, what is left of a save that failed, what a disk may do to it."""

from __future__ import annotations

import errno
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.checkpoint import commit as commit_module
from rlcli.checkpoint.commit import abandon, begin, clear_leftovers, commit, remove, seal, write_json
from rlcli.checkpoint.disk import check_free_space, check_writable, disk_failure, exchange
from rlcli.checkpoint.manifest import FileDigest, Manifest, read_manifest
from rlcli.checkpoint.retention import latest_name
from rlcli.checkpoint.verify import checkpoints_in, newest_verified, verify
from rlcli.errors import ResourceError

SCRIPT = Path(__file__).with_name("one_save.py")
one_save = runpy.run_path(str(SCRIPT))
save, RUN = one_save["save"], one_save["RUN"]


def manifest_of(step: int, digests: list[FileDigest]) -> Manifest:
    return Manifest(step, RUN, "1.0", 1, "digest", {digest.path: digest for digest in digests})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def checkpoints(tmp_path):
    return tmp_path / "checkpoints"


def test_a_checkpoint_is_a_folder_whose_manifest_knows_every_file(checkpoints):
    committed = save(checkpoints, 40, metrics={"eval/accuracy": 0.5})
    assert names(checkpoints) == {"step-000000000040", "LATEST.json"}
    checkpoint = verify(committed)
    assert checkpoint.strangers == ()
    assert checkpoint.manifest == read_manifest(committed)
    assert checkpoint.manifest.metrics == {"eval/accuracy": 0.5}
    there = {path.relative_to(committed).as_posix() for path in committed.rglob("*") if path.is_file()}
    assert there == {*checkpoint.manifest.files, "MANIFEST.json"}
    assert latest_name(checkpoints) == committed.name
    written = json.loads((committed / "MANIFEST.json").read_text())
    assert (written["step"], written["run_id"], written["world_size"]) == (40, RUN, 1)


def test_only_their_owner_reads_checkpoints(checkpoints):
    committed = save(checkpoints, 1)
    assert {path.stat().st_mode & 0o77 for path in (checkpoints, committed)} == {0}


def test_a_metric_that_is_not_finite_does_not_keep_a_checkpoint_from_being_written(checkpoints):
    committed = save(checkpoints, 1, metrics={"loss": float("nan"), "norm": float("inf"), "reward": 1.5})
    assert verify(committed).manifest.metrics == {"reward": 1.5}


def test_seal_digests_what_is_in_the_file(checkpoints):
    folder = begin(checkpoints, 1, RUN)
    (digest,) = seal(folder, [write_json(folder / "state.json", {"a": 0.1})])
    content = (folder / "state.json").read_bytes()
    assert (digest.path, digest.bytes) == ("state.json", len(content))
    assert FileDigest(**json.loads(json.dumps(digest.as_json()))) == digest
    assert json.loads(content) == {"a": 0.1}


def test_a_file_that_nobody_sealed_is_no_part_of_a_checkpoint(checkpoints, monkeypatch):
    monkeypatch.setattr(commit_module, "LATE", 0.05)
    folder = begin(checkpoints, 1, RUN)
    digests = seal(folder, [write_json(folder / "state.json", {})])
    (folder / "other.json").symlink_to("state.json")
    with pytest.raises(ResourceError) as caught:
        commit(folder, manifest_of(1, digests))
    assert caught.value.code == "F27"
    assert "other.json" in caught.value.what
    assert checkpoints_in(checkpoints) == []


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.write_text("longer than before")])
def test_a_file_that_changed_after_it_was_sealed(checkpoints, monkeypatch, change):
    monkeypatch.setattr(commit_module, "LATE", 0.05)
    folder = begin(checkpoints, 1, RUN)
    digests = seal(folder, [write_json(folder / "state.json", {})])
    change(folder / "state.json")
    with pytest.raises(ResourceError, match=r"state\.json"):
        commit(folder, manifest_of(1, digests))


def test_files_of_other_ranks_may_be_seen_late(checkpoints, monkeypatch):
    folder = begin(checkpoints, 1, RUN)
    digests = seal(folder, [write_json(folder / "state.json", {}), write_json(folder / "late.json", {})])
    hidden = checkpoints / "hidden"
    (folder / "late.json").rename(hidden)
    monkeypatch.setattr(commit_module.time, "sleep", lambda seconds: hidden.rename(folder / "late.json"))
    assert verify(commit(folder, manifest_of(1, digests))).manifest.step == 1


def test_a_new_save_clears_away_what_dead_ones_left(checkpoints):
    first = save(checkpoints, 1)
    stale = begin(checkpoints, 2, RUN)
    write_json(stale / "state.json", {})
    (checkpoints / f".del-{RUN}-step-000000000000-5a").mkdir()
    (checkpoints / f".LATEST.json.{RUN}").write_text("{")
    (checkpoints / f".tmp-7-{RUN}").symlink_to(first)
    second = save(checkpoints, 2)
    assert names(checkpoints) == {first.name, second.name, "LATEST.json"}
    assert verify(first).manifest.step == 1


def test_what_is_no_part_of_the_protocol_stays(checkpoints):
    save(checkpoints, 1)
    (checkpoints / "notes.txt").write_text("mine")
    (checkpoints / ".hidden").mkdir()
    save(checkpoints, 2)
    assert {"notes.txt", ".hidden"} < names(checkpoints)


def test_folders_of_other_runs_that_are_half_written_stay(checkpoints):
    other = "00" * 16
    there = {f".tmp-2-{other}", f".del-{other}-step-000000000001-5a", f".tmp-2-{RUN}-more", ".LATEST.json.5a", ".tmp-x"}
    for name in there:
        (checkpoints / name).mkdir(parents=True)
    save(checkpoints, 1)
    clear_leftovers(checkpoints, RUN)
    assert there < names(checkpoints)


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("what", ["file", "link", "folder", "checkpoint of another run"])
def test_what_has_the_name_of_a_new_checkpoint_gives_way_and_stays(
    checkpoints, monkeypatch, tmp_path, what, can_exchange
):
    if not can_exchange:
        monkeypatch.setattr(commit_module, "exchange", lambda one, other: False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    checkpoints.mkdir()
    there = checkpoints / "step-000000000005"
    if what == "file":
        there.write_text("precious")
    elif what == "link":
        there.symlink_to(elsewhere)
    elif what == "folder":
        elsewhere.rename(there)
    else:
        save(checkpoints, 5, "precious", run_id="00" * 16)
    before = there.lstat().st_ino
    committed = save(checkpoints, 5, "now")
    assert json.loads((verify(committed).path / "state.json").read_text())["content"] == "now"
    (moved,) = checkpoints.glob("step-000000000005.*")
    assert moved.lstat().st_ino == before
    assert what == "file" or what.startswith("check") or (moved / "precious").read_text() == "precious"
    assert newest_verified(checkpoints, RUN)[0].path == committed


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_same_step_again_replaces_the_older_one(checkpoints, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(commit_module, "exchange", lambda one, other: False)
    save(checkpoints, 5, "before")
    committed = save(checkpoints, 5, "now")
    assert json.loads((verify(committed).path / "state.json").read_text())["content"] == "now"
    assert names(checkpoints) == {committed.name, "LATEST.json"}


def test_one_that_was_set_aside_counts_until_the_new_one_is_there(checkpoints):
    committed = save(checkpoints, 5)
    aside = committed.rename(committed.with_name(f".old-{committed.name}"))
    checkpoint, rejected = newest_verified(checkpoints)
    assert (checkpoint.path, rejected) == (aside, [])
    clear_leftovers(checkpoints, RUN)
    assert newest_verified(checkpoints)[0].path == committed
    (checkpoints / f".old-{committed.name}").mkdir()
    assert checkpoints_in(checkpoints) == [committed]


def test_exchange_swaps_two_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange")
    assert (tmp_path / "a/b").exists()
    assert (tmp_path / "b/a").exists()
    with pytest.raises(OSError, match="No such file"):
        exchange(tmp_path / "a", tmp_path / "c")


def test_a_checkpoint_that_is_removed_is_gone_at_once(checkpoints):
    committed = save(checkpoints, 1)
    remove(committed, RUN)
    assert names(checkpoints) == {"LATEST.json"}
    with pytest.raises(ResourceError):
        remove(committed, RUN)


def test_an_abandoned_save_leaves_nothing(checkpoints):
    folder = begin(checkpoints, 1, RUN)
    write_json(folder / "state.json", {})
    abandon(folder)
    assert names(checkpoints) == set()


def test_room_is_asked_for_before_it_is_needed(checkpoints):
    check_free_space(checkpoints, 1)
    with pytest.raises(ResourceError) as caught:
        check_free_space(checkpoints, 2**60)
    assert caught.value.code == "F28"
    assert caught.value.where == str(checkpoints)
    assert "1,099,511,627,776 MiB" in caught.value.what
    with pytest.raises(ResourceError, match="free"):
        begin(checkpoints, 1, RUN, needed=2**60)
    assert names(checkpoints) == set()
    assert "free" in caught.value.what


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_started(checkpoints):
    check_writable(checkpoints)
    assert names(checkpoints) == set()
    (checkpoints / "file").touch()
    with pytest.raises(ResourceError):
        check_writable(checkpoints / "file")


def test_what_a_library_says_of_the_disk_is_understood(tmp_path):
    told = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    failure = disk_failure(told, tmp_path)
    assert failure.code == "F28"
    assert "No space left" in failure.what
    assert "MiB free" in failure.what
    assert disk_failure(OSError(errno.EDQUOT, "Disk quota exceeded"), tmp_path).code == "F76"
    assert disk_failure(OSError(errno.EROFS, "Read-only"), tmp_path).code == "F75"
    assert disk_failure(RuntimeError("another"), tmp_path) is None


# -- disks that are full or cannot be written, for real ------------------------------------------------------


ENVIRONMENT = {"PYTHONPATH": str(SCRIPT.parents[2]), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}


def test_files_that_may_not_grow(checkpoints):
    """RLIMIT_FSIZE: what a disk without room does, without a disk."""
    save(checkpoints, 1)

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    command = [sys.executable, "-S", "-s", SCRIPT, checkpoints, "2", "a long text", "3"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert done.returncode == 6, done.stderr
    assert "error[F28]" in done.stdout
    assert "File too large" in done.stdout
    assert names(checkpoints) == {"step-000000000001", "LATEST.json"}
    assert newest_verified(checkpoints)[0].manifest.step == 1


def private_mounts() -> bool:
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif("not private_mounts()", reason="unshare cannot make a private mount here")


@pytest.fixture
def scene(tmp_path):
    """A shell in a mount namespace of its own, and the python of the script."""

    def run(lines: str) -> str:
        script = f'set -u\nsave() {{ "{sys.executable}" -S -s "{SCRIPT}" "$@"; echo "exit $?"; }}\n{lines}'
        command = ["unshare", "-rm", "sh", "-c", script]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        return done.stdout + done.stderr

    return run


@needs_mounts
def test_a_full_disk_costs_the_new_checkpoint_and_no_old_one(scene):
    """Every amount of room from none to enough: a page more each time."""
    said = scene(
        """mkdir disk && mount -t tmpfs -o size=200k none disk && save disk/c 1 x 1
        head -c 300000 /dev/zero > disk/fill
        for room in 0 4096 8192 12288 16384 20480 24576; do
            truncate -s -$room disk/fill; before=$(df --output=avail disk | tail -1)
            save disk/c 2 y 9; after=$(df --output=avail disk | tail -1)
            ls -A disk/c; echo "room $before $after"
            test -e disk/c/step-000000000002 && break
        done"""
    )
    assert "error[F28]" in said
    assert "No space left on device" in said
    assert ".tmp-" not in said.replace("disk/c/.tmp-", "")
    attempts = said.split("exit ")[2:]
    assert attempts[0].startswith("6")
    failed = [attempt for attempt in attempts if attempt.startswith("6")]
    rooms = [line.split()[1:] for attempt in failed for line in attempt.splitlines() if line.startswith("room")]
    assert len(rooms) == len(failed)
    assert all(before == after for before, after in rooms)
    assert attempts[-1].startswith("0")
    assert all("step-000000000001" in attempt for attempt in attempts)


@needs_mounts
def test_a_disk_that_can_only_be_read(scene):
    said = scene(
        "mkdir c && save c 1 x 1 && mount --bind -o ro c c && mount -o remount,ro,bind c; save c 2 y 1; ls -A c"
    )
    assert "error[F75]" in said
    assert "Read-only file system" in said
    assert "exit 6" in said
    assert "step-000000000001" in said
