"""Work in progress as a line: amounts, the time that is left, and widths."""

from __future__ import annotations

import pytest

from rlcli.api.headway import BYTES, SECONDS, Count
from rlcli.observe.activity import Activity


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def activity(clock):
    return Activity(clock)


def test_the_time_left_follows_the_pace_since_the_phase_began_and_counts_down(activity, clock):
    activity.phase("reading the checkpoint")
    assert activity.sentence() == "reading the checkpoint"
    clock.now += 10
    activity.count(Count(2**30, 4 * 2**30, BYTES))
    assert activity.sentence() == "reading the checkpoint: 1 GiB of 4 GiB, eta 0:30"
    clock.now += 8
    assert activity.eta == pytest.approx(22)
    clock.now += 100
    assert activity.eta == 0


def test_what_is_not_counted_shows_how_long_it_takes(activity, clock):
    activity.phase("checking rows and files")
    clock.now += 1
    assert activity.line(80, True).plain == "checking rows and files"
    clock.now += 90
    assert activity.line(80, True).plain == "checking rows and files  1:31 so far"


def test_the_next_count_of_a_phase_has_a_pace_of_its_own(activity, clock):
    activity.phase("loading the models")
    clock.now += 100
    activity.count(Count(10, 10, BYTES))
    assert activity.eta is None
    clock.now += 1
    activity.count(Count(1, 5, "servers"))
    assert activity.sentence() == "loading the models: 1/5 servers, eta 0:04"


def test_a_count_of_something_else_has_its_own_name(activity, clock):
    activity.phase("actor_train")
    activity.count(Count(10, 64, "responses"), "actor_gen")
    clock.now += 6
    activity.count(Count(13, 64, "responses"), "actor_gen")
    assert activity.sentence() == "actor_gen: 13/64 responses, eta 1:42"
    activity.count(Count(64, 64, "responses"), "actor_gen")
    assert activity.sentence().startswith("actor_train")


def test_a_new_phase_forgets_the_count(activity):
    activity.phase("a")
    activity.count(Count(1, 2, "files"))
    activity.phase("b")
    assert activity.sentence() == "b"


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("width", [20, 40, 72, 80, 100])
@pytest.mark.parametrize(
    "label", ["saving", "downloading " + "organisation/model" * 9, "実行中" * 30]
)
def test_a_line_fits_and_keeps_the_time_left(activity, clock, width, label, unicode):
    activity.phase(label)
    clock.now += 10
    activity.count(Count(123_000_000, 456_000_000, BYTES))
    line = activity.line(width, unicode)
    assert line.cell_len <= width
    if width >= 72:
        assert line.plain.endswith("  117 MiB of 435 MiB  eta 0:27")
        assert ("━" if unicode else "#") in line.plain
        assert line.plain.startswith("saving" if label == "saving" else label[:8])


def test_a_phase_that_has_been_timed_shows_what_is_left_of_its_usual_time(activity, clock):
    activity.phase("loading the models")
    activity.count(Count(0, 40, SECONDS))
    clock.now += 10
    assert activity.line(80, True).plain == "loading the models  ━━━━────────────  eta 0:30"
    activity.count(Count(1, 4, "servers"))
    assert activity.sentence() == "loading the models: 1/4 servers, eta 0:30"
    activity.count(Count(4, 4, "servers"))
    clock.now += 31
    assert activity.line(80, True).plain == "loading the models  0:41 so far"
    activity.phase("restoring the checkpoint")
    assert activity.eta is None
