"""How long a set-up takes, which the next one of the recipe shows as the time that is left."""

from __future__ import annotations

import json

from rlcli.api.headway import SECONDS, Count
from rlcli.observe.activity import Activity
from rlcli.observe.setup_times import FILE, SetupTimes, usual_times


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def times_of(phases, usual=None):
    """The content of the file after phases of so many seconds, and what was shown of the last."""
    clock = Clock()
    activity = Activity(clock)
    times = SetupTimes(activity, usual or {}, clock)
    for phase, seconds in phases:
        times.phase(phase)
        clock.now += seconds
    shown = activity.sentence()
    return json.loads(times.end()), shown


def test_phases_are_timed_and_passed_on():
    seconds, shown = times_of([("reading the data", 1.25), ("loading the models", 40)])
    assert seconds == {"reading the data": 1.2, "loading the models": 40.0}
    assert shown == "loading the models: 0:40 so far"


def test_a_phase_of_known_length_shows_what_is_left():
    _, shown = times_of([("loading the models", 15)], {"loading the models": 40.2})
    assert shown == "loading the models: eta 0:25"


def test_the_times_are_those_of_the_run_or_of_the_newest_other_one(tmp_path):
    assert usual_times(tmp_path / "new") == {}
    for name, seconds in (("20260101-000000", 10), ("20260102-000000", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(json.dumps({"loading": seconds}))
    assert usual_times(tmp_path / "new") == {"loading": 20.0}
    assert usual_times(tmp_path / "20260101-000000") == {"loading": 10.0}


def test_a_damaged_file_is_no_time_at_all(tmp_path):
    (tmp_path / "other").mkdir()
    file = tmp_path / "other" / FILE
    for content, times in (("{", {}), ('{"a": "x", "b": 2, "c": true}', {"b": 2.0})):
        file.write_text(content)
        assert usual_times(tmp_path / "new") == times
        shown = times_of([("b", 1.0)], times)[1]
        assert shown == ("b: eta 0:01" if times else "b")


def test_counts_are_passed_on():
    class Heard(Activity):
        def count(self, count, of=""):
            heard.append((count, of))

    heard = []
    times = SetupTimes(Heard(), {"a": 3})
    times.phase("a")
    times.count(Count(1, 2, "ranks"), "b")
    assert heard == [(Count(0, 3, SECONDS), ""), (Count(1, 2, "ranks"), "b")]
