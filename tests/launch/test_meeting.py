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
from rlcli.launch.meeting import LONGEST_ADDRESS, meeting_folder, remove_abandoned
from rlcli.messaging.control import SOCKET

HOME = str(Path(__file__).parents[2])
MASTER = """
import time
from rlcli.launch.meeting import meeting_folder
print(meeting_folder().path, flush=True)
time.sleep(100)
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """The only directory in which such folders are made."""
    monkeypatch.setattr(meeting, "_parents", lambda: [tmp_path])
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
    folder = meeting_folder()
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


def test_a_tmpdir_too_long_for_a_socket_address_is_skipped(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = meeting_folder()
    assert len(os.fsencode(folder.path / SOCKET)) <= LONGEST_ADDRESS
    assert long not in folder.path.parents
    folder.close()
