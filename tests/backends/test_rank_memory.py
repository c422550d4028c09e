"""No rank holds more of a sharded model than it may: `tests/bench/memory.py` on a smaller model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "memory.py"


@pytest.mark.timeout(240)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux' /proc")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_phase_stays_within_its_share_and_the_bound(ranks):
    command = [sys.executable, str(BENCH), "--ranks", str(ranks), "--megabytes", "256", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads(ended.stdout)
    assert len(told["measured"]) == ranks
    for number, phases in enumerate(told["measured"]):
        for name, most in phases.items():
            allowed = told["allowed"][name]
            assert most <= allowed["allowed"], (f"rank {number}", name, most, allowed)
            assert most >= 0.9 * allowed["share"], f"{name} has not been measured: {most} of rank {number}"
