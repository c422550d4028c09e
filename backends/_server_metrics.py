"""What servers report about their own load, for a run's metrics."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping

PATH = "/metrics"
"""The path of the metrics, which all kinds of servers give in the text format of Prometheus."""
SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})? (\S+)(?: -?[0-9]+)?")
"""A line of that format: name, labels, number and perhaps a time."""
GAUGES = ("running", "queued")
"""Requests at the time of a reading. The other numbers count since the server was started:
`prompt_tokens`, `cached_tokens` (those of them that were in the cache) and `preemptions`."""


def read_metrics(text: str, names: Mapping[str, str]) -> dict[str, float]:
    """The numbers that a server reports, each the sum over all labels. `names`: ours → its own.
    What is not a finite number from 0 on is left out."""
    ours = {theirs: name for name, theirs in names.items()}
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = SAMPLE.fullmatch(line)
        name = ours.get(match[1]) if match is not None else None
        if match is not None and name is not None and is_amount(match[2]):
            sums[name] = sums.get(name, 0.0) + float(match[2])
    return {name: total for name, total in sums.items() if math.isfinite(total)}


def is_amount(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


class Meter:
    """Sums up what servers report. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, list[float]] = {}
        self._last: dict[tuple[int, str], float] = {}
        """(server, counter) → its last reading."""

    def read(self, server: int, numbers: Mapping[str, float]) -> None:
        """A reading of a server's metrics."""
        with self._lock:
            for name in GAUGES:
                if name in numbers:
                    self._add(name, numbers[name], 1)
            read = self._gain(server, "prompt_tokens", numbers)
            self._add("cache_hits", self._gain(server, "cached_tokens", numbers), read)
            if "preemptions" in numbers:
                self._add("preemptions", self._gain(server, "preemptions", numbers), 0)

    def count_response(self) -> None:
        """A server has finished a response."""
        with self._lock:
            self._add("preemptions", 0, 1)

    def take(self) -> dict[str, tuple[float, int]]:
        """Name → (sum, count) of everything since the last time."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {
            f"servers/{name}": (total, round(count))
            for name, (total, count) in sums.items()
            if count
        }

    def _add(self, name: str, total: float, count: float) -> None:
        before = self._sums.setdefault(name, [0.0, 0.0])
        before[0] += total
        before[1] += count

    def _gain(self, server: int, name: str, numbers: Mapping[str, float]) -> float:
        """How much a counter has grown since its last reading; if the server has been started again
        meanwhile, since then. A server leaves a counter out until it first counts."""
        if name not in numbers:
            self._last.setdefault((server, name), 0.0)
            return 0.0
        now = numbers[name]
        before = self._last.get((server, name), now)
        self._last[server, name] = now
        return now - before if now >= before else now
