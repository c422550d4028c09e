"""When requests to servers wait, run and are paused, for the timeline of a run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlcli.api.timing import TimeSpan

QUEUED, RUNNING, PAUSED = "queued", "running", "paused"
LAST_PAUSES = 64


@dataclass
class Pause:
    """A time in which servers pause all responses; `ended` is None until they continue."""

    began: float
    ended: float | None = None


class RequestTimes:
    """The times of all requests that have ended. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[TimeSpan] = []
        self._pauses: deque[Pause] = deque(maxlen=LAST_PAUSES)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A time in which all servers pause."""
        pause = Pause(time.monotonic())
        with self._lock:
            self._pauses.append(pause)
        try:
            yield
        finally:
            pause.ended = time.monotonic()

    def note(self, server: str, asked: float, began: float) -> None:
        """A request that was `asked` for, and which a server has worked on since it `began`, has
        ended."""
        ended = time.monotonic()
        with self._lock:
            self._spans += _divided(QUEUED, asked, began, server, self._pauses)
            self._spans += _divided(RUNNING, began, ended, server, self._pauses)

    def take(self) -> list[TimeSpan]:
        """The spans since the last time."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


def _divided(
    state: str, began: float, ended: float, server: str, pauses: Sequence[Pause]
) -> Iterator[TimeSpan]:
    """A time in one state, without that in which servers were paused."""
    for pause in pauses:
        first = max(began, pause.began)
        last = ended if pause.ended is None else min(ended, pause.ended)
        if first < last:
            if began < first:
                yield TimeSpan(state, state, began, first, server)
            yield TimeSpan(PAUSED, PAUSED, first, last, server)
            began = last
    if began < ended:
        yield TimeSpan(state, state, began, ended, server)
