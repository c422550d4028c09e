"""Where the time of a step goes."""

import pytest

from rlcli.runtime.report import StepTimes
from rlcli.topology import WorkerGroup

GROUPS = [WorkerGroup((0, 1), ("actor", "critic")), WorkerGroup((2,), ("rollout",)), WorkerGroup((3,), ("ref",))]
NAMES = ("actor+critic", "rollout", "ref")


def idle(seconds, *of_groups):
    """What is reported of a step in which the groups were idle for so long."""
    found = {f"time/idle/{name}": of_group for name, of_group in zip(NAMES, of_groups, strict=True)}
    shares = {f"time/idle_share/{name}": of_group / seconds for name, of_group in zip(NAMES, of_groups, strict=True)}
    return {"time/step": seconds} | found | shares


def test_idle_is_what_is_left_of_the_time_of_all_ranks_of_a_group():
    times = StepTimes(GROUPS)
    times.count_work({0: 2.0, 1: 4.0})
    times.count_work({0: 2.0, 1: 2.0})
    times.count_work({2: 7.5})
    times.count_work({3: 11.0})  # it began before the last step ended
    assert times.report(10.0) == pytest.approx(idle(10.0, 5.0, 2.5, 0.0))


def test_a_move_takes_as_long_as_its_slowest_rank():
    times = StepTimes(GROUPS)
    times.count_move([0.5, 2.0])
    times.count_move([1.0])
    assert times.report(10.0)["time/moves"] == 3.0


def test_a_step_begins_without_what_was_counted_before():
    now = [3.0]
    times = StepTimes(GROUPS, lambda: now[0])
    times.count_work({0: 5.0, 1: 5.0, 2: 5.0, 3: 5.0})
    times.count_move([1.0])
    now[0] = 8.0
    assert times.seconds == 5.0
    times.begin()
    now[0] = 10.0
    assert times.seconds == 2.0
    assert times.report(2.0) == idle(2.0, 2.0, 2.0, 2.0)
