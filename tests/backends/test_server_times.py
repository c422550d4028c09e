"""When requests to servers wait, run and are paused."""

import pytest

from rlcli.backends import _server_times
from rlcli.backends._server_times import RequestTimes


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    clock = Clock()
    monkeypatch.setattr(_server_times, "time", clock)
    return clock


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


def taken(times):
    return [(span.kind, span.began, span.ended) for span in times.take()]


def test_a_request_is_queued_then_running(clock):
    times = RequestTimes()
    clock.now = 5.0
    times.note("server 0", asked=1.0, began=2.0)
    assert taken(times) == [("queued", 1, 2), ("running", 2, 5)]
    assert taken(times) == []


def test_it_is_paused_whenever_servers_are(clock):
    times = RequestTimes()
    for began, ended in ((1, 3), (4, 5)):
        clock.now = began
        with times.paused():
            clock.now = ended
    clock.now = 6.0
    times.note("server 0", asked=0.0, began=2.0)
    assert taken(times) == [
        ("queued", 0, 1),
        ("paused", 1, 2),
        ("paused", 2, 3),
        ("running", 3, 4),
        ("paused", 4, 5),
        ("running", 5, 6),
    ]


def test_it_may_end_during_a_pause(clock):
    times = RequestTimes()
    clock.now = 2.0
    with times.paused():
        clock.now = 3.0
        times.note("server 0", asked=1.0, began=1.0)
        assert taken(times) == [("running", 1, 2), ("paused", 2, 3)]
