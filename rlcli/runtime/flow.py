"""How a batch of samples goes through calls: a training step, samples made ahead of one, and an
evaluation alike.

A call's whole path is `Flow.go_through` and `Flow._call`; `calls` makes its requests, `ranks` sends
them in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from rlcli.api.dataflow import (
    CallGraph,
    MFCDef,
    ModelInterfaceType,
    earlier_turns,
    in_turn,
    weight_writers,
)
from rlcli.api.output_checks import Segments
from rlcli.runtime.call_times import CHUNK, INPUTS, TENSORS, TURN, WEIGHTS, WORK, CallTimes
from rlcli.runtime.calls import Calls, WeightCopy
from rlcli.runtime.ranks import Turn
from rlcli.runtime.report import Answered, add_report


class Selection(Protocol):
    """Which samples of a batch a call works on: those of a chunk, a step or an evaluation."""

    def ids(self, call: str) -> list[str]:
        """The samples of a call, once the calls that it waits for are done."""

    def drop(self, call: str, reasons: Mapping[str, str]) -> None:
        """A call drops samples: sample → why."""


class Gate:
    """Lets one chunk after the other through a call, so that new weights need not wait for all of
    them."""

    def __init__(self) -> None:
        self.waiting = 0
        """Samples that wait for the call."""
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def let_through(self, samples: int) -> AsyncIterator[None]:
        """Wait until earlier chunks are through, then admit this one, of `samples` samples, and
        keep others out."""
        self.waiting += samples
        async with self._lock:
            self.waiting -= samples
            yield


@dataclass
class Batch:
    """Samples that go through calls together."""

    title: str
    """`step 3`, for errors."""
    samples: Selection
    number: int
    """The number of its training step, from 0, or of its chunk; it seeds what components draw."""
    is_step: bool = True
    """Whether it belongs to a training step: its calls then need the weights that the steps before
    have trained. Others use the current weights."""
    ages: Mapping[str, int] | None = None
    """Sample → its staleness, if it was made ahead of training."""
    gates: Mapping[str, Gate] = field(default_factory=dict)
    """Calls that take one such batch after the other."""
    reports: dict[str, Answered] = field(default_factory=dict)
    """Call → what it answered."""
    versions: dict[str, int] = field(default_factory=dict)
    """Generating call → training steps behind its weights, if these change."""
    segments: dict[str, Mapping[str, Segments]] = field(default_factory=dict)
    """Generating call → sample → the segments of its responses, if weights change meanwhile."""
    done: list[str] = field(default_factory=list)
    """The calls that it has been through, in the order in which they ended."""

    def has_done(self, calls: Iterable[str]) -> bool:
        return all(call in self.done for call in calls)

    def last_done(self, calls: Iterable[str]) -> str:
        """Which of some calls ended last; empty if there are none."""
        return max(calls, key=self.done.index, default="")

    def gate(self, call: str, samples: int) -> AbstractAsyncContextManager[None]:
        """A context that admits `samples` samples to a call."""
        gate = self.gates.get(call)
        return gate.let_through(samples) if gate is not None else nullcontext()

    def take_in(self, answered: Answered) -> None:
        """Note the answer of a call."""
        call = answered.mfc.name
        add_report(self.reports, answered)
        if answered.mfc.interface_type is ModelInterfaceType.GENERATE and answered.updates:
            self.versions[call] = answered.version
            self.segments[call] = answered.segments
        self.samples.drop(call, answered.dropped)

    def reports_in(self, graph: Iterable[MFCDef]) -> list[Answered]:
        """The answers of its calls, in the order of the graph, whichever ended first."""
        return [self.reports[mfc.name] for mfc in graph if mfc.name in self.reports]


class Conditions(asyncio.Event):
    """Lets coroutines wait for conditions other than answers: that calls are done, or samples are
    taken."""

    def note(self) -> None:
        """Have everything that waits check its condition again."""
        self.set()
        self.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        while not condition():
            await self.wait()


class Versions:
    """Training steps behind the weights of each role that changes, directly or as a follower."""

    def __init__(self, graph: Sequence[MFCDef], step: int):
        """`step`: how many are behind all of them now."""
        self.finished = step
        """Steps whose calls are all done."""
        self.last_writer = ""
        """The call that has made the newest version of a role."""
        self._writers = weight_writers(graph)
        self._versions = dict.fromkeys(self._writers, step)
        self._written: set[tuple[str, int]] = set()
        """Calls that have changed weights, and their steps."""

    def of(self, roles: Iterable[str]) -> int:
        """The version of these roles' weights: the lowest if they differ, the number of finished
        steps if none of them changes."""
        return min(
            (self._versions[role] for role in roles if role in self._versions),
            default=self.finished,
        )

    def have_reached(self, roles: Iterable[str], step: int) -> bool:
        """Whether these roles have the weights that the steps before `step` trained."""
        return all(self._versions.get(role, step) >= step for role in roles)

    def write(self, mfc: MFCDef, step: int) -> None:
        """Note that a call has changed weights at a step."""
        self._written.add((mfc.name, step))
        for role in mfc.written_roles:
            if all((writer, step) in self._written for writer in self._writers[role]):
                self._versions[role] = step + 1
                self.last_writer = mfc.name
        self._written = {(call, of_step) for call, of_step in self._written if of_step >= step}


class Flow:
    """Has batches go through calls."""

    def __init__(
        self, calls: Calls, graph: Sequence[MFCDef], step: int = 0, is_asynchronous: bool = False
    ):
        """`graph`: that of training, whose calls change weights; `is_asynchronous`: samples are
        made ahead of it."""
        self.progress = Conditions()
        self.versions = Versions(graph, step)
        self._calls = calls
        self._is_asynchronous = is_asynchronous

    async def go_through(self, graph: Sequence[MFCDef], batch: Batch) -> None:
        """Have a batch go through calls, each as soon as it has what it reads. An error of one
        cancels the others."""
        waits_for = earlier_turns(graph) if self._is_asynchronous else CallGraph(graph).reads
        queued = [
            (mfc, None if self._is_asynchronous else self._turns(mfc)) for mfc in in_turn(graph)
        ]
        async with asyncio.TaskGroup() as calls:
            for mfc, turns in queued:
                calls.create_task(self._call(mfc, waits_for[mfc.name], batch, turns))

    def finish_step(self, step: int) -> None:
        """Note that all calls of a step are done."""
        self.versions.finished = step + 1
        self.progress.note()

    async def _call(
        self, mfc: MFCDef, before: Iterable[str], batch: Batch, turns: CallTurns | None
    ) -> None:
        """The way of one call, after those `before` it; `turns`:
        those that were queued when its batch opened."""
        times = self._calls.follow(mfc, batch.title)
        with _naming(f"in call {mfc.name} of {batch.title}"):
            with times.stage(INPUTS) as inputs:
                await self.progress.until(lambda: batch.has_done(before))
                inputs.cause = batch.last_done(before)
            if batch.is_step:
                await self._reach_version(batch.number, {mfc.model_name, *mfc.written_roles}, times)
            if ids := batch.samples.ids(mfc.name):
                async with times.entering(CHUNK, batch.gate(mfc.name, len(ids))):
                    batch.take_in(await self._compute(mfc, ids, batch, turns, times))
            elif turns is not None:
                await turns.skip()
            if mfc.written_roles:
                self.versions.write(mfc, batch.number)
            batch.done.append(mfc.name)
            self.progress.note()
        self._calls.timeline.end(times)

    async def _reach_version(self, step: int, roles: set[str], times: CallTimes) -> None:
        """Wait until these roles have the weights that the steps before `step` trained."""
        with times.stage(WEIGHTS) as weights:
            await self.progress.until(lambda: self.versions.have_reached(roles, step))
            weights.cause = self.versions.last_writer

    async def _compute(
        self,
        mfc: MFCDef,
        ids: Sequence[str],
        batch: Batch,
        turns: CallTurns | None,
        times: CallTimes,
    ) -> Answered:
        """Move, compute and copy. What is sent in a turn is awaited after it: the ranks have their
        next request before they are done with this one."""
        turns = turns or self._turns(mfc)
        call = self._calls.prepare(mfc, ids, batch.number, batch.ages)
        with times.stage(TENSORS):
            await self._calls.move(call, times)  # the lane works while the owners compute
        async with times.entering(TURN, turns.compute):  # of all ranks involved
            computing = self._calls.run(call, times)
        with times.stage(WORK):
            answered = self._calls.take_in(call, await computing)
        if (copy := self._calls.copy_after(mfc)) is not None:
            turn = self._copy_turn(copy, turns.copy)
            async with times.entering(TURN, turn):  # of source and follower
                copying = self._calls.copy(copy, times)
            with times.stage(WORK):
                seconds, sent = self._calls.copied(copy, await copying)
            answered = replace(answered, copy_seconds=seconds, copy_bytes=sent)
        return answered

    def _turns(self, mfc: MFCDef) -> CallTurns:
        """The next turns of a call.

        They are queued when its batch opens. Where samples are made ahead of training, they are
        queued when the call is ready, so that no rank waits for what takes long elsewhere; and
        until a copy can begin, it only holds the turn of its source.
        """
        queue, copy = self._calls.turns.queue, self._calls.copy_after(mfc)
        compute = queue(self._calls.ranks_of(mfc))
        if copy is None:
            return CallTurns(compute, None)
        return CallTurns(compute, queue(copy.sources if self._is_asynchronous else copy.ranks))

    def _copy_turn(self, copy: WeightCopy, turn: Turn | None) -> Turn:
        """The turn of a copy that can begin. If its follower is busy on other ranks, it comes after
        what the source's ranks were given meanwhile: they would wait for the follower."""
        assert turn is not None
        if self._is_asynchronous and self._calls.are_busy({*copy.followers} - {*copy.sources}):
            self._calls.turns.end(turn)
            return self._calls.turns.queue(copy.ranks)
        self._calls.turns.widen(turn, copy.ranks)
        return turn


@dataclass(frozen=True)
class CallTurns:
    """The turn of a call, and that of a copy of its weights."""

    compute: Turn
    copy: Turn | None

    async def skip(self) -> None:
        """Use up both turns without doing anything."""
        for turn in (self.compute, self.copy):
            if turn is not None:
                async with turn:
                    continue


@contextmanager
def _naming(location: str) -> Iterator[None]:
    """Add to an error where it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(location)
        raise
