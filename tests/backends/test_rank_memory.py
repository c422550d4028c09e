"""No rank holds more of a sharded model than it may: `tests/bench/memory.py`, half a gigabyte of weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "memory.py"
RANKS = ("2", "4")

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux' /proc"),
]


@pytest.fixture(scope="module")
def lines():
    """What the command printed of each number of ranks."""
    command = [sys.executable, str(BENCH), "--ranks", *RANKS, "--megabytes", "512", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=450, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return dict(zip(RANKS, map(json.loads, ended.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("ranks", RANKS)
def test_each_phase_stays_within_its_share_and_the_bound(ranks, lines):
    found = lines[ranks]
    assert len(found["measured"]) == int(ranks)
    for number, phases in enumerate(found["measured"]):
        for name, most in phases.items():
            allowed = found["allowed"][name]
            assert most <= allowed["allowed"], (f"rank {number}", name, most, allowed)
            assert most >= 0.9 * allowed["share"], f"{name} has not been measured: {most} of rank {number}"
