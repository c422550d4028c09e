"""The folder in which a run's processes meet: where it can be, and that it goes with its master, however that dies."""

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
def place(tmp_path, monkeypatch):
    """The only place for such folders."""
    monkeypatch.setattr(meeting, "_places", lambda: [tmp_path])
    monkeypatch.setattr(meeting, "LONGEST_ADDRESS", 10_000)
    return tmp_path


@pytest.fixture
def master():
    """Another process, and its folder in a TMPDIR of its own."""
    with tempfile.TemporaryDirectory(prefix="t") as place:
        process = subprocess.Popen(
            [sys.executable, "-c", MASTER], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": HOME, "TMPDIR": place},
        )  # fmt: skip
        yield process, Path(process.stdout.readline().strip())
        process.kill()
        process.communicate()


def test_it_is_for_its_owner_alone_and_goes_when_it_is_closed(place):
    folder = MeetingFolder()
    assert folder.path.parent == place
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.close()
    assert not folder.path.exists()


def test_the_next_start_removes_that_of_a_master_that_was_killed(master, monkeypatch):
    process, folder = master
    monkeypatch.setenv("TMPDIR", str(folder.parent))
    monkeypatch.setattr(tempfile, "tempdir", None)
    remove_abandoned()
    assert folder.exists(), "its master lives"
    process.kill()
    process.wait()
    remove_abandoned()
    assert not folder.exists()


def test_what_only_looks_like_one_stays(place):
    (place / "rlcli-notes").mkdir()
    (place / "rlcli-notes" / "mine.txt").write_text("mine")
    (place / "rlcli-file").write_text("mine")
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / meeting.LOCK).touch()
    (place / "rlcli-link").symlink_to(elsewhere)
    (place / "rlcli-fifo").mkdir()
    os.mkfifo(place / "rlcli-fifo" / "x")
    before = sorted(place.rglob("*"))
    remove_abandoned()
    assert sorted(place.rglob("*")) == before


def test_that_of_another_user_stays(place, monkeypatch):
    (place / "rlcli-theirs").mkdir()
    (place / "rlcli-theirs" / meeting.LOCK).touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    remove_abandoned()
    assert (place / "rlcli-theirs").exists()


def test_a_long_tmpdir_is_passed_over(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = MeetingFolder()
    assert len(os.fsencode(folder.path / SOCKET)) <= LONGEST_ADDRESS
    assert long not in folder.path.parents
    folder.close()
