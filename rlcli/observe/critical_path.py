"""What determined how long a step took: its critical path, and what ranks waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlcli.api.timing import WAIT, TimeSpan
from rlcli.observe.trace import MASTER, STEP, Trace, Traced

CALLS = ("generate", "inference", "train_step", "copy")
"""Kinds of the spans of calls, and of the copies of weights after them."""
COPY = ".copy_to"
"""What the name of such a copy adds to that of its call."""
BETWEEN = "between calls"
"""Name and kind of a stretch in which no rank works on what the step waits for."""
TOLERANCE = 5e-4
"""Seconds between the end of a span and the beginning of what has waited for it."""


@dataclass(frozen=True)
class Stretch:
    """A part of the path."""

    name: str
    kind: str
    rank: int | None
    """None if it is none's."""
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class StepTrace:
    """A step, and what overlaps with it."""

    number: int
    window: TimeSpan
    traced: Sequence[Traced]

    @property
    def seconds(self) -> float:
        return self.window.seconds

    def inside(self, span: TimeSpan) -> float:
        """The seconds of a span that are within the step."""
        began, ended = max(span.began, self.window.began), min(span.ended, self.window.ended)
        return max(0.0, ended - began)

    @cached_property
    def calls(self) -> list[Traced]:
        """The calls of ranks, and copies of weights."""
        return [each for each in self._of_ranks if each.span.kind in CALLS]

    @cached_property
    def waits(self) -> list[Traced]:
        """The times in which a rank computed nothing."""
        return [each for each in self._of_ranks if each.span.kind == WAIT and not each.of]

    @cached_property
    def waits_inside_calls(self) -> list[Traced]:
        return [each for each in self._of_ranks if each.span.kind == WAIT and each.of]

    @cached_property
    def _of_ranks(self) -> list[Traced]:
        return [each for each in self.traced if each.process != MASTER]


def steps_of(trace: Trace) -> list[StepTrace]:
    """All steps of a trace, in order."""
    every = [each for of_step in trace.steps.values() for each in of_step]
    windows = {
        number: each.span
        for number, of_step in trace.steps.items()
        for each in of_step
        if each.process == MASTER and each.span.kind == STEP
    }
    return [
        StepTrace(number, window, [each for each in every if _overlap(each.span, window)])
        for number, window in windows.items()
    ]


def _overlap(first: TimeSpan, second: TimeSpan) -> bool:
    return first.began < second.ended and second.began < first.ended


def median_step(steps: Sequence[StepTrace]) -> StepTrace:
    """The step whose duration is the median. The first of several does not count: it warms up."""
    ordered = sorted(steps[1:] or steps, key=lambda step: step.seconds)
    return ordered[(len(ordered) - 1) // 2]


# -- the path --------------------------------------------------------------------------------------


def critical_path(step: StepTrace) -> list[Stretch]:
    """The path from the beginning of a step to its end, without gaps: what would have to be shorter
    for the step to be shorter.

    It is followed backwards. Before a call, its rank worked on another one, or waited: then the
    path continues with the call that ended the wait, on the rank where it ended last.
    """
    path: list[Stretch] = []
    at, rank, first = step.window.ended, None, step.window.began
    left = list(step.calls)
    while at - first > TOLERANCE:
        call = _call_before(step, left, at, rank)
        ended = max(first, call.span.ended) if call is not None else first
        if at - ended > TOLERANCE:
            path.append(Stretch(BETWEEN, BETWEEN, None, ended, at))
        if call is None:
            break
        left.remove(call)  # a copy that has only waited ends where the path continues
        wait = _last_wait_inside(step, call)
        began = max(first, wait.span.ended if wait is not None else call.span.began)
        path += _stretch_of(call, began, min(ended, at))
        at, rank = min(began, at), call.process if wait is None else None
    return path[::-1]


def _stretch_of(call: Traced, began: float, ended: float) -> list[Stretch]:
    """The stretch of a call; none of one that has only waited."""
    stretch = Stretch(call.span.name, call.span.kind, call.process, began, ended)
    return [stretch] if ended > began else []


def _call_before(
    step: StepTrace, calls: Sequence[Traced], at: float, rank: int | None
) -> Traced | None:
    """The one of some calls that something at a time had to wait for; on any rank, or on `rank`."""
    wait = _latest((each for each in step.waits if each.process == rank), at)
    call = _latest((each for each in calls if each.process == rank), at)
    if call is not None and (wait is None or call.span.ended >= wait.span.ended - TOLERANCE):
        return call
    awaited = {wait.cause, wait.cause + COPY} if wait is not None else set[str]()
    named = _latest((each for each in calls if each.span.name in awaited), at)
    if named is not None and wait is not None and named.span.ended > wait.span.began:
        return named
    return _latest(calls, at)


def _latest(traced: Iterable[Traced], at: float) -> Traced | None:
    """What ended last, up to a time, and began before it."""
    earlier = (
        each
        for each in traced
        if each.span.ended <= at + TOLERANCE and each.span.began < at - TOLERANCE
    )
    return max(earlier, key=lambda each: each.span.ended, default=None)


def _last_wait_inside(step: StepTrace, call: Traced) -> Traced | None:
    """The last time that a copy waited for ranks that were late."""
    waits = (
        each
        for each in step.waits_inside_calls
        if each.track == call.track and _overlap(each.span, call.span)
    )
    last = max(waits, key=lambda each: each.span.ended, default=None)
    return last if call.span.kind == "copy" else None


# -- what is waited for ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RankWaits:
    """What some ranks, which run the same calls, wait for."""

    ranks: tuple[int, ...]
    calls: tuple[str, ...]
    seconds: dict[str, float]
    """What for → seconds of a rank, mean; the longest first."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def waits_of(step: StepTrace) -> list[RankWaits]:
    """The waits of all ranks in a step."""
    ranks = sorted({each.process for each in [*step.calls, *step.waits]})
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        names = (each.span.name for each in step.calls if each.process == rank)
        groups.setdefault(tuple(sorted(set(names))), []).append(rank)
    return [
        RankWaits(tuple(of_group), calls, _waits(step, of_group))
        for calls, of_group in groups.items()
    ]


def _waits(step: StepTrace, ranks: Sequence[int]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for wait in step.waits:
        if wait.process in ranks:
            name = wait.span.name.removeprefix("waits ")
            seconds[name] = seconds.get(name, 0.0) + step.inside(wait.span) / len(ranks)
    return dict(sorted(seconds.items(), key=lambda entry: -entry[1]))
