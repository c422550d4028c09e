"""Counts of ranks on their way to whoever shows the run."""

from __future__ import annotations

import pytest

from rlcli.api import headway
from rlcli.api.headway import BYTES, Count, doing, heard_by
from rlcli.messaging.messages import COUNTED, Report, Request
from rlcli.runtime import rank_counts
from rlcli.runtime.rank_counts import LOADING, CountReporter, RankCounts


class Shown:
    """Remembers what it was shown."""

    def __init__(self):
        self.counts = []

    def phase(self, text):
        raise AssertionError("the master says what is done")

    def count(self, count, of=""):
        self.counts.append((of, count))


@pytest.fixture
def shown():
    return Shown()


def reported(rank, number, op, done, total, unit=BYTES):
    value = {"number": number, "of": op, "count": [done, total, unit]}
    return Report(rank, COUNTED, value)


def test_counts_of_ranks_are_added_up_under_the_name_of_the_phase(shown):
    counts = RankCounts(shown)
    counts.take(reported(0, 7, "build", 10, 100))
    counts.take(reported(1, 7, "build", 30, 100))
    counts.take(reported(0, 7, "build", 40, 100))
    assert shown.counts == [
        (LOADING, Count(10, 100, BYTES)),
        (LOADING, Count(40, 200, BYTES)),
        (LOADING, Count(70, 200, BYTES)),
    ]


def test_a_later_request_of_the_same_name_starts_over_and_stragglers_are_ignored(shown):
    counts = RankCounts(shown)
    counts.take(reported(0, 7, "actor_gen", 8, 8, "responses"))
    counts.take(reported(1, 9, "actor_gen", 1, 8, "responses"))
    counts.take(reported(1, 7, "actor_gen", 8, 8, "responses"))
    assert shown.counts[-1] == ("actor_gen", Count(1, 8, "responses"))
    assert len(shown.counts) == 2


def test_only_counts_of_one_unit_are_added(shown):
    counts = RankCounts(shown)
    counts.take(reported(0, 7, "build", 10, 100))
    counts.take(reported(1, 7, "build", 1, 2, "servers"))
    assert shown.counts[-1] == (LOADING, Count(1, 2, "servers"))


def test_a_rank_reports_now_and_then_and_the_end(monkeypatch):
    monkeypatch.setattr(headway, "APART", 0.0)
    monkeypatch.setattr(rank_counts, "APART", 1000.0)
    reports = []
    reporter = CountReporter(
        lambda name, value, failure: reports.append((name, value)),
        Request(3, "run_call", {"call": "actor_gen"}),
        world_size=8,
    )
    with heard_by(reporter), doing("sampling", 5, "responses") as work:
        for _ in range(5):
            work.advance()
    assert reports == [
        (COUNTED, {"number": 3, "of": "actor_gen", "count": [done, 5, "responses"]})
        for done in (1, 5)
    ]


def test_many_ranks_report_less_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rank_counts.time, "monotonic", lambda: now[0])
    reports = []
    reporter = CountReporter(lambda *report: reports.append(report), Request(1, "build"), 4000)
    for second in range(100):
        now[0] = float(second + 1)
        reporter.count(Count(second, 1000, BYTES))
    assert len(reports) == 3
