"""Work that may take seconds says so, and counts, for whoever shows it: a line on a terminal, the
display of a run, or the master of a rank.

    with doing("reading the checkpoint", total=size, unit=BYTES) as work:
        ...
        work.advance(len(block))

Nothing happens unless somebody listens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

BYTES = "bytes"
SECONDS = "seconds"
"""Unit of what is only known to take so long: it is done as time passes."""
APART = 0.25
"""Seconds between two reports of a count."""


class Count(NamedTuple):
    """How much of some work is done."""

    done: int
    total: int
    unit: str
    """BYTES, SECONDS, or the plural of a noun."""


class Listener(Protocol):
    """Shows work, or passes it on. `count` is called by any thread."""

    def phase(self, text: str) -> None:
        """This is done from now on; empty: nothing that takes long."""

    def count(self, count: Count, of: str = "") -> None:
        """So much is done of what is named; by default of the current phase."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_phase: ContextVar[str] = ContextVar("phase", default="")


class Headway:
    """Counts; threads may share it."""

    def __init__(self, total: int, unit: str):
        self._total, self._unit = total, unit
        self._listener = _listener.get()
        self._lock = threading.Lock()
        self._done = 0
        self._due = 0.0

    def expect(self, total: int) -> None:
        """Correct the total."""
        self._total = total

    def advance(self, number: int = 1) -> None:
        """So much more is done."""
        if self._listener is None:
            return
        with self._lock:
            self._done += number
            now, is_over = time.monotonic(), self._done >= self._total
            if now < self._due and not is_over:
                return
            self._due = now + APART
            count = Count(self._done, self._total, self._unit)
        self._listener.count(count)


@contextmanager
def doing(text: str, total: int = 0, unit: str = "") -> Iterator[Headway]:
    """Work with a name of its own: a phase until the block ends."""
    before = _phase.get()
    token = _phase.set(text)
    say(text)
    try:
        yield Headway(total, unit)
    finally:
        _phase.reset(token)
        say(before)


def say(text: str) -> None:
    """Say what is done from now on."""
    if (listener := _listener.get()) is not None:
        listener.phase(text)


def current_listener() -> Listener | None:
    """Who listens to this thread or task."""
    return _listener.get()


@contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Have somebody, or nobody, listen to this thread or task."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
