"""What a process does while it answers a request, and what it waits for.

The thread that answers records the time (`recorded`). Whatever it calls may add spans to it, with
`waiting`, `apart` and `add_span`; where nothing is recorded, these do nothing. Spans are sent to
the master with the answer.

Times are seconds of CLOCK_MONOTONIC (`time.monotonic`), which all processes of a machine share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field, replace
from typing import Any

WAIT = "wait"
"""Kind of a span in which a thread waits."""
MOST_SPANS = 4_000
"""Spans of one answer; later ones are left out."""
SHORTEST = 1e-3
"""Seconds below which a wait is counted, but is not a span of its own."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Something that took from `began` to `ended`."""

    name: str
    kind: str
    """What it is drawn as: a call, a wait, a request to a server."""
    began: float
    ended: float
    track: str = ""
    """Where it is drawn; empty: with the request during which it was recorded."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def shifted(self, seconds: float) -> TimeSpan:
        """The same by a clock that is so many seconds ahead."""
        return replace(self, began=self.began + seconds, ended=self.ended + seconds)


@dataclass
class Timing:
    """The time of one request."""

    began: float
    ended: float
    apart: float = 0.0
    """Seconds in between that are not those of the request itself, such as waits for others."""
    spans: list[TimeSpan] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of the request itself."""
        return max(0.0, self.ended - self.began - self.apart)

    def add(self, span: TimeSpan) -> None:
        if len(self.spans) < MOST_SPANS:
            self.spans.append(span)

    def shifted(self, seconds: float) -> Timing:
        """The same by a clock that is so many seconds ahead."""
        spans = [span.shifted(seconds) for span in self.spans]
        return Timing(self.began + seconds, self.ended + seconds, self.apart, spans)

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"spans": [astuple(span) for span in self.spans]}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Timing:
        return cls(**fields | {"spans": [TimeSpan(*values) for values in fields["spans"]]})


_current: ContextVar[Timing | None] = ContextVar("timing", default=None)


@contextmanager
def recorded() -> Iterator[Timing]:
    """Record the time of a request that this thread answers."""
    now = time.monotonic()
    timing = Timing(now, now)
    token = _current.set(timing)
    try:
        yield timing
    finally:
        _current.reset(token)
        timing.ended = time.monotonic()


def add_span(span: TimeSpan) -> None:
    """Add what this thread, or another one on its behalf, has done during the request."""
    if (timing := _current.get()) is not None:
        timing.add(span)


@contextmanager
def apart(name: str, kind: str = WAIT) -> Iterator[None]:
    """Time that does not count as that of the request: it waits for others, or does something that
    is not its own work."""
    began = time.monotonic()
    try:
        yield
    finally:
        ended = time.monotonic()
        if (timing := _current.get()) is not None:
            timing.apart += ended - began
            if ended - began >= SHORTEST:
                timing.add(TimeSpan(name, kind, began, ended))


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """A wait that counts as time of the request."""
    began = time.monotonic()
    try:
        yield
    finally:
        ended = time.monotonic()
        if ended - began >= SHORTEST:
            add_span(TimeSpan(name, WAIT, began, ended))
