"""Saving a checkpoint: its files, leftovers of failed saves,
and disks that are full or read-only."""

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
from rlcli.checkpoint.commit import (
    abandon,
    add_metrics,
    begin,
    clear_leftovers,
    commit,
    remove,
    seal,
    write_json,
)
from rlcli.checkpoint.disk import check_free_space, check_writable, exchange
from rlcli.checkpoint.manifest import FileDigest, Manifest, read_manifest
from rlcli.checkpoint.retention import latest_name
from rlcli.checkpoint.verify import checkpoints_in, newest_verified, verify
from rlcli.disk_errors import disk_failure
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


def test_the_manifest_of_a_checkpoint_lists_every_file(checkpoints):
    committed = save(checkpoints, 40, metrics={"eval/accuracy": 0.5})
    assert names(checkpoints) == {"step-000000000040", "LATEST.json"}
    checkpoint = verify(committed)
    assert checkpoint.strangers == ()
    assert checkpoint.manifest == read_manifest(committed)
    assert checkpoint.manifest.metrics == {"eval/accuracy": 0.5}
    files = {
        path.relative_to(committed).as_posix() for path in committed.rglob("*") if path.is_file()
    }
    assert files == {*checkpoint.manifest.files, "MANIFEST.json"}
    assert latest_name(checkpoints) == committed.name
    written = json.loads((committed / "MANIFEST.json").read_text())
    assert (written["step"], written["run_id"], written["world_size"]) == (40, RUN, 1)


def test_checkpoints_are_readable_only_by_their_owner(checkpoints):
    committed = save(checkpoints, 1)
    assert {path.stat().st_mode & 0o77 for path in (checkpoints, committed)} == {0}


def test_metrics_that_are_not_finite_are_left_out_of_the_manifest(checkpoints):
    committed = save(
        checkpoints, 1, metrics={"loss": float("nan"), "norm": float("inf"), "reward": 1.5}
    )
    assert verify(committed).manifest.metrics == {"reward": 1.5}


def test_a_checkpoint_that_gets_metrics_later_stays_as_old_as_it_is(checkpoints):
    committed = save(checkpoints, 40, metrics={"actor/loss": 0.5})
    os.utime(committed / "MANIFEST.json", (1e9, 1e9))
    add_metrics(committed, {"eval/accuracy": 1.0})
    assert verify(committed).manifest.metrics == {"actor/loss": 0.5, "eval/accuracy": 1.0}
    assert (committed / "MANIFEST.json").stat().st_mtime == 1e9


def test_seal_returns_digest_and_size_of_the_content(checkpoints):
    folder = begin(checkpoints, 1, RUN)
    (digest,) = seal(folder, [write_json(folder / "state.json", {"a": 0.1})])
    content = (folder / "state.json").read_bytes()
    assert (digest.path, digest.bytes) == ("state.json", len(content))
    assert FileDigest(**json.loads(json.dumps(digest.as_json()))) == digest
    assert json.loads(content) == {"a": 0.1}


def test_a_file_that_was_not_sealed_is_refused(checkpoints, monkeypatch):
    monkeypatch.setattr(commit_module, "LATE", 0.05)
    folder = begin(checkpoints, 1, RUN)
    digests = seal(folder, [write_json(folder / "state.json", {})])
    (folder / "other.json").symlink_to("state.json")
    with pytest.raises(ResourceError) as caught:
        commit(folder, manifest_of(1, digests))
    assert caught.value.code == "F27"
    assert "other.json" in caught.value.what
    assert checkpoints_in(checkpoints) == []


@pytest.mark.parametrize(
    "change", [lambda file: file.unlink(), lambda file: file.write_text("longer than before")]
)
def test_a_file_changed_after_sealing_is_refused(checkpoints, monkeypatch, change):
    monkeypatch.setattr(commit_module, "LATE", 0.05)
    folder = begin(checkpoints, 1, RUN)
    digests = seal(folder, [write_json(folder / "state.json", {})])
    change(folder / "state.json")
    with pytest.raises(ResourceError, match=r"state\.json"):
        commit(folder, manifest_of(1, digests))


def test_a_commit_waits_for_files_that_appear_late(checkpoints, monkeypatch):
    folder = begin(checkpoints, 1, RUN)
    digests = seal(
        folder, [write_json(folder / "state.json", {}), write_json(folder / "late.json", {})]
    )
    hidden = checkpoints / "hidden"
    (folder / "late.json").rename(hidden)
    monkeypatch.setattr(
        commit_module.time, "sleep", lambda seconds: hidden.rename(folder / "late.json")
    )
    assert verify(commit(folder, manifest_of(1, digests))).manifest.step == 1


def test_a_new_save_removes_leftovers_of_killed_saves(checkpoints):
    first = save(checkpoints, 1)
    stale = begin(checkpoints, 2, RUN)
    write_json(stale / "state.json", {})
    (checkpoints / f".del-{RUN}-step-000000000000-5a").mkdir()
    (checkpoints / f".LATEST.json.{RUN}").write_text("{")
    (checkpoints / f".tmp-7-{RUN}").symlink_to(first)
    second = save(checkpoints, 2)
    assert names(checkpoints) == {first.name, second.name, "LATEST.json"}
    assert verify(first).manifest.step == 1


def test_unrelated_files_are_kept(checkpoints):
    save(checkpoints, 1)
    (checkpoints / "notes.txt").write_text("mine")
    (checkpoints / ".hidden").mkdir()
    save(checkpoints, 2)
    assert {"notes.txt", ".hidden"} < names(checkpoints)


def test_incomplete_folders_of_other_runs_are_kept(checkpoints):
    other_run = "00" * 16
    leftovers = {
        f".tmp-2-{other_run}",
        f".del-{other_run}-step-000000000001-5a",
        f".tmp-2-{RUN}-more",
        ".LATEST.json.5a",
        ".tmp-x",
    }
    for name in leftovers:
        (checkpoints / name).mkdir(parents=True)
    save(checkpoints, 1)
    clear_leftovers(checkpoints, RUN)
    assert leftovers < names(checkpoints)


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("kind", ["file", "link", "folder", "checkpoint of another run"])
def test_an_unrelated_path_with_the_name_of_a_new_checkpoint_is_renamed(
    checkpoints, monkeypatch, tmp_path, kind, can_exchange
):
    if not can_exchange:
        monkeypatch.setattr(commit_module, "exchange", lambda first, second: False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    checkpoints.mkdir()
    existing = checkpoints / "step-000000000005"
    if kind == "file":
        existing.write_text("precious")
    elif kind == "link":
        existing.symlink_to(elsewhere)
    elif kind == "folder":
        elsewhere.rename(existing)
    else:
        save(checkpoints, 5, "precious", run_id="00" * 16)
    before = existing.lstat().st_ino
    committed = save(checkpoints, 5, "now")
    assert json.loads((verify(committed).path / "state.json").read_text())["content"] == "now"
    (moved,) = checkpoints.glob("step-000000000005.*")
    assert moved.lstat().st_ino == before
    assert (
        kind == "file" or kind.startswith("check") or (moved / "precious").read_text() == "precious"
    )
    assert newest_verified(checkpoints, RUN)[0].path == committed


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_of_the_same_step_is_replaced(checkpoints, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(commit_module, "exchange", lambda first, second: False)
    save(checkpoints, 5, "before")
    committed = save(checkpoints, 5, "now")
    assert json.loads((verify(committed).path / "state.json").read_text())["content"] == "now"
    assert names(checkpoints) == {committed.name, "LATEST.json"}


def test_a_checkpoint_set_aside_is_valid_until_it_is_replaced(checkpoints):
    committed = save(checkpoints, 5)
    aside = committed.rename(committed.with_name(f".old-{committed.name}"))
    checkpoint, rejected = newest_verified(checkpoints)
    assert (checkpoint.path, rejected) == (aside, [])
    clear_leftovers(checkpoints, RUN)
    assert newest_verified(checkpoints)[0].path == committed
    (checkpoints / f".old-{committed.name}").mkdir()
    assert checkpoints_in(checkpoints) == [committed]


def test_exchange_swaps_two_folders_or_fails(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange")
    assert (tmp_path / "a/b").exists()
    assert (tmp_path / "b/a").exists()
    with pytest.raises(OSError, match="No such file"):
        exchange(tmp_path / "a", tmp_path / "c")


def test_a_removed_checkpoint_disappears_at_once(checkpoints):
    committed = save(checkpoints, 1)
    remove(committed, RUN)
    assert names(checkpoints) == {"LATEST.json"}
    with pytest.raises(ResourceError):
        remove(committed, RUN)


def test_an_abandoned_save_leaves_no_files(checkpoints):
    folder = begin(checkpoints, 1, RUN)
    write_json(folder / "state.json", {})
    abandon(folder)
    assert names(checkpoints) == set()


def test_too_little_free_space_is_reported_before_writing(checkpoints):
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


def test_a_folder_that_is_not_writable_is_refused(checkpoints):
    check_writable(checkpoints)
    assert names(checkpoints) == set()
    (checkpoints / "file").touch()
    with pytest.raises(ResourceError):
        check_writable(checkpoints / "file")


def test_disk_errors_are_recognised_in_errors_of_libraries(tmp_path):
    library_error = RuntimeError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )
    failure = disk_failure(library_error, tmp_path)
    assert failure.code == "F28"
    assert "No space left" in failure.what
    assert "MiB free" in failure.what
    assert disk_failure(OSError(errno.EDQUOT, "Disk quota exceeded"), tmp_path).code == "F76"
    assert disk_failure(OSError(errno.EROFS, "Read-only"), tmp_path).code == "F75"
    assert disk_failure(RuntimeError("another"), tmp_path) is None


# -- disks that are really full or read-only ------------------------------------------------------


ENVIRONMENT = {
    "PYTHONPATH": str(SCRIPT.parents[2]),
    "PATH": os.environ["PATH"],
    "PYTHONDONTWRITEBYTECODE": "1",
}


def test_a_file_size_limit_keeps_the_older_checkpoint(checkpoints):
    """RLIMIT_FSIZE imitates a full disk."""
    save(checkpoints, 1)

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    command = [sys.executable, "-S", "-s", SCRIPT, checkpoints, "2", "a long text", "3"]
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, preexec_fn=limit
    )
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


needs_mounts = pytest.mark.skipif(
    "not private_mounts()", reason="unshare cannot make a private mount here"
)


@pytest.fixture
def run_in_namespace(tmp_path):
    """Runs shell commands, with `save` among them, in a private mount namespace."""

    def run(lines: str) -> str:
        script = (
            f'set -u\nsave() {{ "{sys.executable}" -S -s "{SCRIPT}" "$@"; echo '
            f'"exit $?"; }}\n{lines}'
        )
        command = ["unshare", "-rm", "sh", "-c", script]
        done = subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        return done.stdout + done.stderr

    return run


@needs_mounts
def test_a_full_disk_keeps_the_older_checkpoint_and_leaves_no_files(run_in_namespace):
    """For each amount of free space from none to enough, in steps of a page."""
    output = run_in_namespace(
        """mkdir disk && mount -t tmpfs -o size=200k none disk && save disk/c 1 x 1
        head -c 300000 /dev/zero > disk/fill
        for room in 0 4096 8192 12288 16384 20480 24576; do
            truncate -s -$room disk/fill; before=$(df --output=avail disk | tail -1)
            save disk/c 2 y 9; after=$(df --output=avail disk | tail -1)
            ls -A disk/c; echo "room $before $after"
            test -e disk/c/step-000000000002 && break
        done"""
    )
    assert "error[F28]" in output
    assert "No space left on device" in output
    assert ".tmp-" not in output.replace("disk/c/.tmp-", "")
    attempts = output.split("exit ")[2:]
    assert attempts[0].startswith("6")
    failed = [attempt for attempt in attempts if attempt.startswith("6")]
    rooms = [
        line.split()[1:]
        for attempt in failed
        for line in attempt.splitlines()
        if line.startswith("room")
    ]
    assert len(rooms) == len(failed)
    assert all(before == after for before, after in rooms)
    assert attempts[-1].startswith("0")
    assert all("step-000000000001" in attempt for attempt in attempts)


@needs_mounts
def test_a_read_only_disk_is_reported_and_keeps_its_checkpoint(run_in_namespace):
    output = run_in_namespace(
        "mkdir c && save c 1 x 1 && mount --bind -o ro c c && mount -o remount,ro,bind "
        "c; save c 2 y 1; ls -A c"
    )
    assert "error[F75]" in output
    assert "Read-only file system" in output
    assert "exit 6" in output
    assert "step-000000000001" in output
