"""What each rank has worked on, by the master's clock: from the times that come with its
answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from rlcli.api.timing import TimeSpan, Timing
from rlcli.messaging.messages import COMPUTE, MOVE, Fields
from rlcli.runtime.call_times import CallTimes
from rlcli.runtime.clocks import Clocks

KINDS = {MOVE: "move", "copy_weights": "copy", "checkpoint": "checkpoint"}
"""Operation → what it is drawn as; a call as what it is (`generate`), the others as OTHER."""
OTHER = "other"
Lane = tuple[int, str]
"""A rank, and one of its lanes."""


@dataclass(frozen=True)
class Asked:
    """A request to some ranks."""

    number: int
    name: str
    kind: str
    lane: str
    sent: float
    call: CallTimes | None
    """The call that it belongs to."""


@dataclass(frozen=True)
class RankWork:
    """A request that a rank has answered."""

    rank: int
    asked: Asked
    timing: Timing


class RankTimes:
    """The work of all ranks since it was last drained, and what they work on now."""

    def __init__(self, clocks: Clocks, clock: Callable[[], float] = time.monotonic):
        self.clocks = clocks
        self._clock = clock
        self._works: list[RankWork] = []
        self._spans: list[tuple[int, TimeSpan]] = []
        self._open: dict[Lane, dict[int, Asked]] = {}
        """What each lane was asked and has not answered, the oldest first."""
        self._ends: dict[Lane, float] = {}
        """When each lane has last answered."""

    def sent(
        self,
        number: int,
        op: str,
        name: str,
        lane: str,
        ranks: Collection[int],
        call: CallTimes | None,
    ) -> None:
        """A request is sent to ranks."""
        is_call = call is not None and op == "run_call"
        kind = call.kind if call is not None and is_call else KINDS.get(op, OTHER)
        asked = Asked(number, name, kind, lane, self._clock(), call)
        for rank in ranks:
            self._open.setdefault((rank, lane), {})[number] = asked

    def answered(self, number: int, rank: int, lane: str, fields: Fields) -> Fields:
        """A rank has answered, with the time that it recorded; returns its `seconds`, if the
        request belongs to a call."""
        now, who = self._clock(), (rank, lane)
        asked = self._open[who].pop(number)
        timing = Timing.from_json(fields) if fields else Timing(now, now)
        if fields:
            self.clocks.note(rank, asked.sent, timing.began, timing.ended, now)
        if ahead := self.clocks.ahead(rank):
            timing = timing.shifted(-ahead)
        self._ends[who] = timing.ended
        self._works.append(RankWork(rank, asked, timing))
        return {"seconds": timing.seconds} if asked.call is not None else {}

    def add(self, rank: int, span: TimeSpan) -> None:
        """Add what a rank does besides its requests, by its clock."""
        self._spans.append((rank, span.shifted(-self.clocks.ahead(rank))))

    def drain(self) -> tuple[list[RankWork], list[tuple[int, TimeSpan]]]:
        """What was answered, and added, since the last time."""
        works, self._works = self._works, []
        spans, self._spans = self._spans, []
        return works, spans

    def in_progress(self) -> Iterator[tuple[int, float, Asked]]:
        """Each rank that works on something now, since when, and on what."""
        for who, requests in self._open.items():
            if requests:
                oldest = next(iter(requests.values()))
                yield who[0], max(oldest.sent, self._ends.get(who, 0.0)), oldest

    def cancel(self) -> None:
        """Nothing is waited for any more."""
        self._open.clear()


def lane_label(lane: str) -> str:
    """The name of a lane in a timeline."""
    return "calls" if lane == COMPUTE else lane
