"""The limit on open files: raised, compared with what a run needs,
and named where it is too low."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.errors import ResourceError
from rlcli.launch.meeting import meeting_folder
from rlcli.messaging import zmq_master
from rlcli.messaging.zmq_master import ZmqMaster
from rlcli.open_files import (
    HIGHEST,
    OF_A_PROCESS,
    needed_by_master,
    needed_by_rank,
    raise_limit,
    too_few,
)

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "allowed", "raised_to"),
    [
        ((1024, 4096), 4096, (4096, 4096)),
        ((4096, 4096), 4096, None),
        ((1024, INFINITY), HIGHEST, (HIGHEST, INFINITY)),
        ((1024, 1 << 30), HIGHEST, (HIGHEST, 1 << 30)),
        ((1 << 21, 1 << 30), 1 << 21, None),
        ((INFINITY, INFINITY), HIGHEST, None),
    ],
)
def test_the_soft_limit_is_raised_to_the_hard_one_within_reason(
    monkeypatch, limits, allowed, raised_to
):
    changes = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: changes.append(pair))
    assert raise_limit() == allowed
    assert changes == ([raised_to] if raised_to else [])


def test_a_child_inherits_the_raised_limit():
    program = (
        "import resource, subprocess, sys\n"
        "from rlcli.open_files import raise_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))\n"
        "raise_limit()\n"
        "subprocess.run(['sh', '-c', 'ulimit -n'], check=True)\n"
    )
    home = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=home, check=True
    )
    assert done.stdout == "512\n"


def test_the_master_needs_descriptors_for_each_rank_and_a_rank_for_each_peer():
    assert needed_by_master(64, 512, 512) > 5 * 512
    assert needed_by_master(1, 2, 2) - OF_A_PROCESS == 2 + 4 * 2 + 2
    assert needed_by_rank(512) == OF_A_PROCESS + 2 * 512


def test_the_error_names_the_limit_and_the_number_that_is_needed():
    error = too_few(32, 108, "the master")
    assert (error.code, error.exit_code) == ("F61", 6)
    assert error.what == "the master may open 32 files (ulimit -n), and needs 108 in this run"
    assert "at least 108" in error.hint


def test_a_master_without_descriptors_names_the_limit_and_not_a_rank(monkeypatch):
    monkeypatch.setattr(zmq_master, "has_none_left", lambda: True)
    meeting = meeting_folder()
    master = ZmqMaster(meeting.path, 3, lambda patience: None)
    try:
        with pytest.raises(
            ResourceError, match=r"may open \d+ files \(ulimit -n\), and has none left"
        ) as raised:
            master.wait_for_workers(0.3)
    finally:
        master.close()
        meeting.close()
    assert raised.value.code == "F61"
