"""Runs ahead of training on simulated servers, whose responses differ greatly in length."""

from __future__ import annotations

import runpy
import statistics
from pathlib import Path

import pytest

SERVERS, STEPS = 4, 40
SLACK = 1.3


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCLI_PROJECT", "")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(Path(__file__).parent / "bound.py"))
    names["prepare"](tmp_path)
    (tmp_path / "bound.yaml").write_text(names["RECIPE"])
    return names


@pytest.mark.exhaustive
def test_a_run_takes_little_longer_than_its_training_or_its_generation(bench):
    figures = bench["measure"](servers=8, steps=60)
    assert bench["problems"](figures, SLACK) == []


@pytest.mark.exhaustive
def test_a_run_that_samples_one_chunk_at_a_time_is_found(bench, monkeypatch):
    monkeypatch.setattr("rlcli.runtime.calls.pausing_roles", lambda recipe, topology: ())
    ahead = bench["run"](SERVERS, 8, 4)
    assert ahead.seconds > 2 * bench["least"](ahead, SERVERS)


@pytest.mark.exhaustive
def test_prompts_with_long_responses_are_trained_on_as_often_as_others(bench):
    """Each row of an epoch once, whatever the length of its responses; and but for the steps of
    `max_staleness` at both ends, in which only order counts, long ones are no rarer."""
    staleness = 4
    ahead = bench["run"](SERVERS, STEPS, staleness)
    trained = [line["sample"] for line in ahead.ledger]
    assert sorted(trained) == sorted(f"e0r{row}" for row in range(len(trained)))
    longest = [
        statistics.fmean(map(max, map(bench["seconds_of"], samples)))
        for _, samples in sorted(bench["batches_of"](ahead).items())
    ]
    inner = longest[staleness:-staleness]
    assert statistics.fmean(inner) == pytest.approx(statistics.fmean(longest), rel=0.1)
    assert highest(ahead, "samples/expired") == 0
    assert highest(ahead, "staleness/max") <= staleness
    assert highest(ahead, "segments/max") <= staleness + 1


def highest(outcome, metric):
    return max(record[metric] for record in outcome.metrics)
