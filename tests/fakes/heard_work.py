"""Somebody who listens to work, and remembers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlcli.api.headway import Count, heard_by


class HeardWork:
    """Phases and counts, in order."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.counts: list[Count] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def count(self, count: Count, of: str = "") -> None:
        self.counts.append(count)


@contextmanager
def heard_work() -> Iterator[HeardWork]:
    """What is heard of the work of a block."""
    heard = HeardWork()
    with heard_by(heard):
        yield heard
