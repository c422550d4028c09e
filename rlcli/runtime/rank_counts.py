"""What ranks count, on its way to whoever shows the run: every rank reports its own count, and the
master adds them up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rlcli.api.headway import Count, Listener
from rlcli.messaging.messages import COUNTED, Report, Request, Tell

READING = "reading the data"
LOADING = "loading the models"
VERIFYING = "verifying the checkpoint"
RESTORING = "restoring the checkpoint"
PHASES = {
    "open_datasets": READING,
    "build": LOADING,
    "verify": VERIFYING,
    "restore": RESTORING,
}
"""Operation of a rank → the phase in which the master requests it. Calls go by their names."""

APART = 1.0
"""Seconds between two reports of a rank, and at least as many as there are hundreds of ranks."""


class CountReporter:
    """Implements `rlcli.api.headway.Listener` on a rank that handles a request."""

    def __init__(self, report: Tell, request: Request, world_size: int):
        self._report, self._request = report, request
        self._apart = max(APART, world_size / 100)
        self._due = 0.0

    def phase(self, text: str) -> None:
        """Do nothing: the master knows what it has requested."""

    def count(self, count: Count, of: str = "") -> None:
        now = time.monotonic()
        if now >= self._due or count.done >= count.total:
            self._due = now + self._apart
            value = {"number": self._request.number, "of": self._request.name, "count": [*count]}
            self._report(COUNTED, value, None)


@dataclass
class _Counts:
    """The counts of the ranks that handle one request."""

    number: int
    by_rank: dict[int, Count] = field(default_factory=dict)


class RankCounts:
    """Adds up what ranks report, and passes it on."""

    def __init__(self, listener: Listener):
        self._listener = listener
        self._latest: dict[str, _Counts] = {}
        """Operation or call → the counts for the latest request."""

    def take(self, report: Report) -> None:
        number, of = int(report.value["number"]), str(report.value["of"])
        count = Count(*report.value["count"])
        latest = self._latest.get(of)
        if latest is None or latest.number < number:
            latest = self._latest[of] = _Counts(number)
        if latest.number > number:
            return
        latest.by_rank[report.rank] = count
        alike = [other for other in latest.by_rank.values() if other.unit == count.unit]
        done, total = sum(other.done for other in alike), sum(other.total for other in alike)
        self._listener.count(Count(done, total, count.unit), PHASES.get(of, of))
