"""Where the time of a step goes: what each rank works on, and what it waits for meanwhile.

The metrics of a step's time follow from the same spans that are written to the trace of the run.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rlcli.api.timing import SHORTEST, WAIT, TimeSpan
from rlcli.messaging.messages import COMPUTE
from rlcli.observe.trace import MASTER, STEP, STEPS, Traced, TraceFile
from rlcli.runtime.call_times import WORK, CallTimes
from rlcli.runtime.rank_times import Asked, RankTimes, RankWork, lane_label
from rlcli.topology import WorkerGroup
from rlcli.topology.groups import MOVES

NEGLIGIBLE = 5e-5
"""Seconds below which a rank's wait is not drawn."""
FOR_MASTER = "the master"
Busy = tuple[float, float, Asked]
"""When a rank began and ended a request, and which."""


@dataclass(frozen=True)
class Gap:
    """A time in which a rank works on nothing, and the call that it works on next."""

    began: float
    ended: float
    before: CallTimes | None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Timeline:
    """The time of one step after the other. A step ends when its record is measured; the next one
    begins after that, and after an evaluation or a checkpoint."""

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        ranks: RankTimes,
        aside: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        """`aside`: lanes in which a rank does not compute."""
        self._groups = {"+".join(group.roles): group.ranks for group in groups}
        self._ranks = ranks
        self._aside = aside
        self._file: TraceFile | None = None
        self._clock = clock
        self._following: dict[CallTimes, None] = {}
        """Calls on their way, the oldest first."""
        self._ended: list[CallTimes] = []
        self._master: list[TimeSpan] = []
        """What the master has done since the last step."""
        self.begin_step()

    def write_to(self, file: TraceFile) -> None:
        """Write the steps to a file from now on. What ranks did before is not in it."""
        self._file = file
        self._ranks.drain()

    def begin_step(self) -> None:
        """Start timing the next step."""
        self._began = self._clock()

    def follow(self, call: str, kind: str, of: str, ranks: tuple[int, ...]) -> CallTimes:
        """The times of a call that is on its way, until it ends."""
        times = CallTimes(call, kind, of, ranks, self._clock)
        self._following[times] = None
        return times

    def end(self, times: CallTimes) -> None:
        """A call has ended."""
        del self._following[times]
        self._ended.append(times)

    @contextmanager
    def doing(self, name: str, kind: str) -> Iterator[None]:
        """Time that belongs to no step: that of an evaluation or a checkpoint."""
        began = self._clock()
        yield
        self._master.append(TimeSpan(name, kind, began, self._clock(), STEPS))

    def end_step(self, step: int) -> dict[str, float]:
        """End a step, counted from 1, and add it to the trace. Returns its metrics: its `time/step`
        and `time/moves`, and for each group of ranks `time/idle/<roles>`, the mean seconds in which
        its ranks computed nothing, and `time/idle_share/<roles>`."""
        window = TimeSpan(f"step {step}", STEP, self._began, self._clock(), STEPS)
        works, spans = self._ranks.drain()
        master, self._master = [*self._master, window], []
        calls, self._ended = self._ended, []
        gaps = self._gaps(works, window)
        if self._file is not None:
            self._file.clocks = self._ranks.clocks.described()
            self._file.add(step, self._traced(master, calls, works, spans, gaps))
        return self._metrics(window.seconds, works, gaps)

    def write(self) -> None:
        """Write what is not in the file yet."""
        if self._file is not None:
            self._file.write()

    # -- what ranks wait for -----------------------------------------------------------------------

    def _gaps(self, works: Sequence[RankWork], window: TimeSpan) -> dict[int, list[Gap]]:
        """When each rank computed nothing within a step."""
        busy: dict[int, list[Busy]] = {
            rank: [] for ranks in self._groups.values() for rank in ranks
        }
        for work in works:
            if work.asked.lane not in self._aside:
                busy[work.rank].append((work.timing.began, work.timing.ended, work.asked))
        for rank, since, asked in self._ranks.in_progress():
            if asked.lane not in self._aside:
                busy[rank].append((since, window.ended, asked))
        return {rank: self._between(rank, busy[rank], window) for rank in sorted(busy)}

    def _between(self, rank: int, busy: Sequence[Busy], window: TimeSpan) -> list[Gap]:
        """The gaps of a rank."""
        gaps, until = list[Gap](), window.began
        for began, ended, asked in sorted(busy, key=lambda interval: interval[0]):
            if began > until:
                gaps.append(Gap(until, min(began, window.ended), asked.call))
            until = max(until, ended)
        if until < window.ended:
            gaps.append(Gap(until, window.ended, self._next_on(rank)))
        return [gap for gap in gaps if gap.seconds > 0]

    def _next_on(self, rank: int) -> CallTimes | None:
        """The next call of a rank that has not been sent."""
        calls = (call for call in self._following if rank in call.ranks and not call.is_sent)
        return next(calls, None)

    def _metrics(
        self, seconds: float, works: Sequence[RankWork], gaps: dict[int, list[Gap]]
    ) -> dict[str, float]:
        times = {"time/step": seconds}
        for name, ranks in self._groups.items():
            idle = sum(gap.seconds for rank in ranks for gap in gaps[rank]) / len(ranks)
            times[f"time/idle/{name}"] = idle
            if seconds:
                times[f"time/idle_share/{name}"] = idle / seconds
        slowest: defaultdict[int, float] = defaultdict(float)
        for work in works:
            if work.asked.lane == MOVES:
                number = work.asked.number
                slowest[number] = max(slowest[number], work.timing.seconds)
        if slowest:
            times["time/moves"] = sum(slowest.values())
        return times

    # -- the trace ---------------------------------------------------------------------------------

    def _traced(
        self,
        master: Sequence[TimeSpan],
        calls: Sequence[CallTimes],
        works: Sequence[RankWork],
        spans: Sequence[tuple[int, TimeSpan]],
        gaps: dict[int, list[Gap]],
    ) -> Iterator[Traced]:
        """Everything that ended in a step."""
        yield from (Traced(MASTER, span) for span in master)
        for call in sorted(calls, key=lambda call: call.stages[0].began):
            yield from self._of_call(call)
        for work in sorted(works, key=lambda work: work.timing.began):
            yield from self._of_work(work)
        for rank, span in spans:
            yield self._apart(rank, span, "")
        ends = sorted(
            (work.timing.ended, work.asked.call.call)
            for work in works
            if work.asked.call is not None and work.asked.lane != MOVES
        )
        for rank, of_rank in gaps.items():
            for gap in of_rank:
                yield from _waits(rank, gap, ends)

    def _of_call(self, call: CallTimes) -> Iterator[Traced]:
        """A call on its way."""
        ended = call.stages[-1].ended or self._clock()
        track = self._track(MASTER, call.call, call.stages[0].began, ended)
        for stage in call.stages:
            end = stage.ended or ended
            is_work = stage.reason == WORK
            if is_work or end - stage.began >= SHORTEST:
                name = call.call if is_work else f"waits for {stage.name}"
                span = TimeSpan(name, call.kind if is_work else WAIT, stage.began, end, track)
                yield Traced(MASTER, span, call.of, stage.cause)

    def _of_work(self, work: RankWork) -> Iterator[Traced]:
        """A request, and what its rank recorded meanwhile."""
        asked, timing = work.asked, work.timing
        track = self._track(work.rank, lane_label(asked.lane), timing.began, timing.ended)
        of = asked.call.of if asked.call is not None else ""
        span = TimeSpan(_name(asked), asked.kind, timing.began, timing.ended, track)
        yield Traced(work.rank, span, of)
        for inner in timing.spans:
            name = f"waits for {inner.name}" if inner.kind == WAIT else inner.name
            named = replace(inner, name=name, track=inner.track or track)
            yield self._apart(work.rank, named, of) if inner.track else Traced(work.rank, named, of)

    def _apart(self, rank: int, span: TimeSpan, of: str) -> Traced:
        """A span on a track of its own."""
        track = self._track(rank, span.track, span.began, span.ended)
        return Traced(rank, replace(span, track=track), of)

    def _track(self, process: int, track: str, began: float, ended: float) -> str:
        assert self._file is not None
        return self._file.free_track((process, track), began, ended)


def _name(asked: Asked) -> str:
    is_copy = asked.call is not None and asked.kind == "copy"
    return f"{asked.call.call}.copy_to" if is_copy and asked.call is not None else asked.name


def _waits(rank: int, gap: Gap, ends: Sequence[tuple[float, str]]) -> Iterator[Traced]:
    """What a rank waits for in a gap. `ends`: when calls ended on any rank."""
    until = gap.began
    for stage in gap.before.waits if gap.before is not None else ():
        began, ended = max(stage.began, until), min(stage.ended or gap.ended, gap.ended)
        if ended > began:
            yield from _unexplained(rank, until, began, ends)
            yield from _wait(rank, stage.name, began, ended, stage.cause)
            until = ended
    yield from _unexplained(rank, until, gap.ended, ends)


def _unexplained(
    rank: int, began: float, ended: float, ends: Sequence[tuple[float, str]]
) -> Iterator[Traced]:
    """A wait for what nothing else is known of: the last call that ended in it, then the master."""
    before = bisect_right(ends, ended, key=lambda end: end[0])
    end, call = ends[before - 1] if before else (began, "")
    if end > began:
        yield from _wait(rank, call, began, end, call)
        began = end
    yield from _wait(rank, FOR_MASTER, began, ended, "")


def _wait(rank: int, name: str, began: float, ended: float, cause: str) -> Iterator[Traced]:
    if ended - began > NEGLIGIBLE:
        span = TimeSpan(f"waits for {name}", WAIT, began, ended, lane_label(COMPUTE))
        yield Traced(rank, span, cause=cause)
