"""Work that says what it does and counts, and who hears it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from heard_work import heard_work

from rlcli.api import headway
from rlcli.api.headway import BYTES, Count, doing, say


@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setattr(headway, "APART", 0.0)
    with heard_work() as work:
        yield work


def test_a_block_is_a_phase_with_a_count_and_the_phase_around_it_follows(heard):
    with doing("restoring", 2, BYTES) as outer:
        outer.advance()
        with doing("reading", 10, BYTES) as inner:
            inner.advance(4)
            inner.advance(6)
        outer.advance()
    assert heard.phases == ["restoring", "reading", "restoring", ""]
    assert heard.counts == [
        Count(1, 2, BYTES), Count(4, 10, BYTES), Count(10, 10, BYTES), Count(2, 2, BYTES),
    ]  # fmt: skip


def test_a_phase_ends_with_an_error(heard):
    with pytest.raises(ZeroDivisionError), doing("dividing"):
        raise ZeroDivisionError
    assert heard.phases == ["dividing", ""]


def test_without_a_listener_nothing_happens():
    with doing("reading", 1) as work:
        work.advance()
        say("still reading")


def test_threads_of_a_block_count_together(heard):
    with doing("reading", 100, "files") as work, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: work.advance(), range(100)))
    assert heard.counts[-1] == Count(100, 100, "files")
    assert sorted(count.done for count in heard.counts) == [*range(1, 101)]


def test_counts_that_follow_at_once_are_left_out_but_not_the_last(heard, monkeypatch):
    monkeypatch.setattr(headway, "APART", 1000.0)
    with doing("reading", 100, "files") as work:
        for _ in range(100):
            work.advance()
    assert [count.done for count in heard.counts] == [1, 100]


def test_a_total_may_become_known_later(heard):
    with doing("downloading", unit=BYTES) as work:
        work.expect(8)
        work.advance(2)
    assert heard.counts == [Count(2, 8, BYTES)]
