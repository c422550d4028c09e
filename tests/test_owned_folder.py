"""A temporary folder of one process: private, and removed however the process ends."""

import os
import platform
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlcli.owned_folder import LOCK, OwnedFolder, remove_abandoned, temporary_folder

OWNER = """
import sys, time
from pathlib import Path
from rlcli.owned_folder import OwnedFolder
print(OwnedFolder(Path(sys.argv[1]), "weights-").path, flush=True)
time.sleep(100)
"""


@pytest.fixture
def owner(tmp_path):
    """Another process, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def test_it_is_private_and_removed_when_closed(tmp_path):
    folder = OwnedFolder(tmp_path, "weights-")
    assert folder.path.parent == tmp_path
    assert folder.path.name.startswith("rlcli-weights-")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.close()
    assert not folder.path.exists()
    folder.close()


def test_a_folder_whose_removal_was_interrupted_is_still_known_as_abandoned(tmp_path, monkeypatch):
    folder = OwnedFolder(tmp_path)
    (folder.path / "a").mkdir()
    for number in range(100):
        (folder.path / f"part-{number}").touch()
    with monkeypatch.context() as patched:
        unlink, removed = os.unlink, []

        def interrupted(path, **options):
            if len(removed) == 100:
                raise KeyboardInterrupt
            removed.append(Path(path).name)
            unlink(path, **options)

        patched.setattr(os, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            folder.close()
    assert [path.name for path in folder.path.iterdir()] == [LOCK]
    os.close(folder._lock)  # as its process ends
    remove_abandoned(tmp_path)
    assert not folder.path.exists()


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(owner, tmp_path):
    process, folder = owner
    (folder / "model.safetensors").write_bytes(b"weights")
    remove_abandoned(tmp_path)
    assert folder.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    remove_abandoned(tmp_path)
    assert not folder.exists()


def test_a_temporary_folder_is_made_after_abandoned_ones_are_removed(owner, tmp_path, monkeypatch):
    process, _ = owner
    process.kill()
    process.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("model-") as folder:
        assert list(tmp_path.iterdir()) == [folder]
        remove_abandoned(tmp_path)
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_only_look_like_one_are_kept(tmp_path):
    (tmp_path / "rlcli-notes").mkdir()
    (tmp_path / "rlcli-notes" / "mine.txt").write_text("mine")
    (tmp_path / "rlcli-file").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).write_text(platform.node())
    (tmp_path / "rlcli-link").symlink_to(elsewhere)
    (tmp_path / "rlcli-fifo").mkdir()
    os.mkfifo(tmp_path / "rlcli-fifo" / LOCK)
    before = sorted(tmp_path.rglob("*"))
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("stranger", ["user", "machine"])
def test_the_folder_of_another_user_or_machine_is_kept(owner, tmp_path, monkeypatch, stranger):
    process, folder = owner
    process.kill()
    process.wait()
    with monkeypatch.context() as patched:
        if stranger == "user":
            patched.setattr(os, "getuid", lambda: 12345)
        else:
            patched.setattr(platform, "node", lambda: "another-machine")
        remove_abandoned(tmp_path)
        assert folder.exists()
    remove_abandoned(tmp_path)
    assert not folder.exists()
