"""No rank holds more of a sharded model than it may: `tests/bench/memory.py`,
half a gigabyte of weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "memory.py"
RANKS = ("2", "4")

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        not Path("/proc/self/status").exists(), reason="memory is read from Linux' /proc"
    ),
]


def records_of(*options):
    """The record that the command printed for each number of ranks."""
    command = [sys.executable, str(BENCH), "--ranks", *RANKS, *options, "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=450, check=False)
    assert completed.returncode == 0, completed.stderr[-2000:]
    return dict(zip(RANKS, map(json.loads, completed.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def records():
    return records_of("--megabytes", "512")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_stays_within_its_allowed_memory_in_every_phase(ranks, records):
    record = records[ranks]
    assert len(record["measured"]) == int(ranks)
    for number, phases in enumerate(record["measured"]):
        for name, most in phases.items():
            allowed = record["allowed"][name]
            assert most <= allowed["allowed"], (f"rank {number}", name, most, allowed)
            assert most >= 0.9 * allowed["share"], (
                f"{name} has not been measured: {most} of rank {number}"
            )


@pytest.mark.exhaustive
def test_the_peak_of_training_falls_with_context_parallel_ranks_as_planned():
    """Of sequences so long that activations outweigh the model."""
    records = records_of("--megabytes", "48", "--dimension", "cp", "--length", "768")
    peaks = {}
    for ranks, record in records.items():
        peaks[ranks] = max(phases["train"] for phases in record["measured"])
        assert peaks[ranks] == pytest.approx(record["planned"]["train"], rel=0.15), ranks
        assert max(phases["generate"] for phases in record["measured"]) < peaks[ranks]
    assert peaks["4"] < 0.6 * peaks["2"]


@pytest.mark.exhaustive
def test_the_peak_of_training_falls_with_expert_parallel_ranks_as_planned():
    records = records_of("--megabytes", "128", "--dimension", "ep")
    peaks = {}
    for ranks, record in records.items():
        peaks[ranks] = max(phases["train"] for phases in record["measured"])
        assert peaks[ranks] == pytest.approx(record["planned"]["train"], rel=0.15), ranks
    assert peaks["4"] < 0.6 * peaks["2"]
