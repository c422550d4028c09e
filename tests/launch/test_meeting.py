"""The folder in which a run's processes meet: where it may be,
and that it is removed however its master dies."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlcli.launch import meeting
from rlcli.launch.meeting import LONGEST_ADDRESS, MeetingFolder, remove_abandoned
from rlcli.runtime.control import SOCKET

HOME = str(Path(__file__).parents[2])
MASTER = """
import time
from rlcli.launch.meeting import MeetingFolder
print(MeetingFolder().path, flush=True)
time.sleep(100)
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """The only directory in which such folders are made."""
    monkeypatch.setattr(meeting, "_places", lambda: [tmp_path])
    monkeypatch.setattr(meeting, "LONGEST_ADDRESS", 10_000)
    return tmp_path


@pytest.fixture
def master():
    """Another process, and its folder in a TMPDIR of its own."""
    with tempfile.TemporaryDirectory(prefix="t") as tmpdir:
        process = subprocess.Popen(
            [sys.executable, "-c", MASTER],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": HOME, "TMPDIR": tmpdir},
        )
        yield process, Path(process.stdout.readline().strip())
        process.kill()
        process.communicate()


def test_the_folder_is_private_and_removed_when_closed(parent):
    folder = MeetingFolder()
    assert folder.path.parent == parent
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.close()
    assert not folder.path.exists()


def test_the_next_start_removes_the_folder_of_a_killed_master(master, monkeypatch):
    process, folder = master
    monkeypatch.setenv("TMPDIR", str(folder.parent))
    monkeypatch.setattr(tempfile, "tempdir", None)
    remove_abandoned()
    assert folder.exists(), "its master lives"
    process.kill()
    process.wait()
    remove_abandoned()
    assert not folder.exists()


def test_folders_that_only_look_like_a_meeting_folder_are_kept(parent):
    (parent / "rlcli-notes").mkdir()
    (parent / "rlcli-notes" / "mine.txt").write_text("mine")
    (parent / "rlcli-file").write_text("mine")
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / meeting.LOCK).touch()
    (parent / "rlcli-link").symlink_to(elsewhere)
    (parent / "rlcli-fifo").mkdir()
    os.mkfifo(parent / "rlcli-fifo" / "x")
    before = sorted(parent.rglob("*"))
    remove_abandoned()
    assert sorted(parent.rglob("*")) == before


def test_the_folder_of_another_user_is_kept(parent, monkeypatch):
    (parent / "rlcli-theirs").mkdir()
    (parent / "rlcli-theirs" / meeting.LOCK).touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    remove_abandoned()
    assert (parent / "rlcli-theirs").exists()


def test_a_tmpdir_too_long_for_a_socket_address_is_skipped(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = MeetingFolder()
    assert len(os.fsencode(folder.path / SOCKET)) <= LONGEST_ADDRESS
    assert long not in folder.path.parents
    folder.close()
