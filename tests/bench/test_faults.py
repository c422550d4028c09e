"""A few of the disturbed runs of `faults.py`, and planted bugs that it must find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.py")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": str(HOME),
}
SEEDS = "0,3,4,7,8,9"
"""A killed rank, master, agent, pool process and supervisor, and a disk that fails;
with staleness 0 and 2."""

pytestmark = pytest.mark.timeout(400)


def run_bench(*arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", program] if program else [str(FAULTS)]), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=380)


@pytest.mark.exhaustive
def test_disturbed_runs_are_exact_or_name_the_culprit():
    bench = run_bench("--seeds", SEEDS)
    assert bench.returncode == 0, bench.stdout + bench.stderr
    assert "6 runs, 0 failed" in bench.stdout, bench.stdout


PLANTED = """
import runpy, sys
sys.argv[0] = {bench!r}
bench = runpy.run_path({bench!r})
from rlcli.launch.world import World
from rlcli.runtime.data_order import DataOrder

rank_error, at = World._rank_error, DataOrder.at
World._rank_error = lambda self, node, rank, how: rank_error(self, node, 1 - rank, how)
DataOrder.at = lambda self, place: at(self, place + ("resume" in sys.argv))
sys.exit(bench["main"](sys.argv[1:]))
"""
"""Errors name another rank, and a resumed run skips a row."""


@pytest.mark.exhaustive
def test_the_bench_finds_a_wrong_culprit_and_a_lost_sample():
    bench = run_bench("--seeds", "38,22", program=PLANTED.format(bench=str(FAULTS)))
    assert bench.returncode == 1, bench.stdout + bench.stderr
    assert "2 runs, 2 failed" in bench.stdout, bench.stdout
    assert "but its error is not" in bench.stdout, bench.stdout
    assert ": drawn [" in bench.stdout, bench.stdout
