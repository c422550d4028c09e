"""Supplies training steps with samples: draws them and has them go through the calls before
training.

At staleness 0 a step draws its own when it opens. Above that samples are made ahead of all steps,
which take those that are ready.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from rlcli.api.dataflow import CallGraph, MFCDef, ModelInterfaceType, calls_ahead
from rlcli.errors import DataError
from rlcli.recipe.graph import train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.calls import Calls
from rlcli.runtime.checkpoints import RunState, Start
from rlcli.runtime.data_order import DataOrder, StepSizes
from rlcli.runtime.flow import Batch, Flow, Gate
from rlcli.runtime.report import Answered
from rlcli.runtime.samples import Admission, Chunk, Draw, Ready, SampleQueue, Samples, StepSamples

GENERATE = ModelInterfaceType.GENERATE


@dataclass
class Step(Batch):
    """A training step: its samples, which go through its calls."""

    samples: StepSamples

    def ledger(self, state: str) -> Iterator[dict[str, Any]]:
        """A line for each finished sample; `state`: of those that were not dropped."""
        return self.samples.ledger(state, self.versions)


class Supply:
    """The samples of a run, on their way to training."""

    def __init__(
        self,
        recipe: Recipe,
        calls: Calls,
        flow: Flow,
        samples: Samples,
        sizes: StepSizes,
        steps: int,
        should_stop: Callable[[], bool],
    ):
        """`steps`: of the run."""
        self.samples = samples
        self.sizes = sizes
        self.is_ahead = bool(samples.rule.max_staleness)
        """Whether samples are made ahead of all steps."""
        self.failure: DataError | None = None
        """Why no further step can begin: too many samples were dropped."""
        self._calls = calls
        self._flow = flow
        self._before = before = calls_before_training(recipe)
        self.calls_in_steps = [mfc for mfc in train_graph(recipe) if mfc not in before]
        """The calls that a batch goes through."""
        self.steps = steps
        self.opened = sizes.first_step
        """Steps that have taken their samples."""
        self._should_stop = should_stop
        self._graph = train_graph(recipe)
        self._dataset = recipe.train.dataset
        may_be_short = recipe.trained_roles and any(mfc.drops for mfc in self._graph)
        self._epochs = recipe.train.epochs if may_be_short else None
        """Passes over the data after which the run ends if samples may be dropped, perhaps before
        the planned steps."""
        self._roles = {mfc.model_name for mfc in before if mfc.interface_type is GENERATE}
        """Roles whose weights generate samples."""
        self._gates = {mfc.name: Gate() for mfc in before} if self.is_ahead else {}
        self._reports: dict[int, dict[str, Answered]] = {}
        """Chunk → what its calls answered, if no step has reported it."""
        self._last_expired = 0
        self._dropped: Counter[str] = Counter()
        """Reason → samples dropped ahead since the last step was done."""

    @property
    def is_used_up(self) -> bool:
        """Whether no step is left, because all rows of the epochs were trained on or dropped."""
        return self._are_rows_drawn and not self.samples.running and not self.samples.ready

    @property
    def _are_rows_drawn(self) -> bool:
        queue, rows = self.samples.queue, self.sizes.rows
        if self._epochs is None or rows is None or queue.position < self._epochs * rows:
            return False
        return all(draw.epoch >= self._epochs for draw in queue.returned)

    # -- making samples ----------------------------------------------------------------------------

    async def next_step(self, number: int) -> Step | None:
        """A step with its samples, once they are there; None if the run ends before it."""
        step, size = Step(f"step {number + 1}", StepSamples([]), number), self.sizes.size(number)
        if self.is_ahead:
            await self._flow.progress.until(lambda: self._is_over or self._has(size, number))
        elif not self._is_over:
            await self._make_batch(size, step)
        if self._is_over:
            return None
        self.opened = number + 1
        step.samples = self.samples.take(size)
        self._calls.forget(step.samples.surplus)
        self._flow.progress.note()
        if self.is_ahead:
            step.ages = {sample.id: sample.staleness(number) for sample in step.samples.batch}
        return step

    async def make_ahead(self) -> None:
        """Keep samples in progress, as many as later steps may take, and no more than the run
        needs. Never ends, but if each step makes its own."""
        if not self.is_ahead:
            return
        async with asyncio.TaskGroup() as chunks:
            while True:
                while (chunk := self._next_chunk()) is not None:
                    title = f"samples made ahead, chunk {chunk.number + 1}"
                    batch = Batch(title, chunk, chunk.number, is_step=False, gates=self._gates)
                    chunks.create_task(self._make(chunk, batch))
                await self._flow.progress.wait()

    def _next_chunk(self) -> Chunk | None:
        is_over = self.failure is not None or self._should_stop()
        return None if is_over else self.samples.admit(self._limit())

    async def _make_batch(self, size: int, step: Step) -> None:
        """Draw, and draw again to replace dropped samples, until a step has its own."""
        while not self.samples.has(size):
            try:
                chunk = self.samples.admit(self.sizes.position(step.number + 1))
            except DataError as error:
                self.failure = error
                self._calls.forget(self.samples.abandon())
                return
            if chunk is None:  # dropped samples are not replaced
                return
            batch = Batch(
                step.title, chunk, step.number, reports=step.reports, versions=step.versions
            )
            await self._make(chunk, batch)

    async def _make(self, chunk: Chunk, batch: Batch) -> None:
        """Have a chunk go through the calls before training."""
        await self._load(chunk)
        await self._flow.go_through(self._before, batch)
        try:
            dropped = self.samples.end(chunk, batch.versions)
        except DataError as error:
            self.failure, dropped = error, []
        self._calls.forget(dropped)
        if self.is_ahead:
            self._reports[chunk.number] = batch.reports
        self._flow.progress.note()

    async def _load(self, chunk: Chunk) -> None:
        """Have its rows loaded; those that a stream turns out not to have are replaced."""
        draws = chunk.draws
        while draws:
            rows = [(draw.id, draw.row, draw.attempt) for draw in draws]
            missing, length = await self._calls.load(self._graph, self._dataset, rows)
            draws = self.samples.redraw(chunk, missing, length) if missing else []

    def _limit(self) -> float:
        """How many samples may be accepted while the weights that there are generate them. Once all
        rows are drawn: as many as fill the last batch, which is known when none is in progress."""
        version = self._flow.versions.of(self._roles)
        most = self.sizes.position(min(version + self.samples.rule.max_staleness + 1, self.steps))
        if not self._are_rows_drawn:
            return min(most, self.samples.accepted + self._rows_left)
        if self.samples.running:
            return 0
        ends_of_steps = (self.sizes.position(step) for step in count(version))
        return min(most, next(end for end in ends_of_steps if end >= self.samples.accepted))

    @property
    def _rows_left(self) -> float:
        """Rows of the epochs that may still be drawn: no chunk reaches beyond them."""
        if self._epochs is None or self.sizes.rows is None:
            return math.inf
        queue = self.samples.queue
        return max(0, self._epochs * self.sizes.rows - queue.position) + len(queue.returned)

    @property
    def _is_over(self) -> bool:
        return (
            self.failure is not None or self.is_used_up or (self.is_ahead and self._should_stop())
        )

    def _has(self, size: int, step: int) -> bool:
        """Whether a step can begin. Samples that have become too stale for it are given back."""
        if self.samples.has(size):
            self._calls.forget(self.samples.expire(step))
        return self.samples.has(size)

    # -- reporting ---------------------------------------------------------------------------------

    def drain_drops(self) -> list[dict[str, Any]]:
        """Ledger entries: the samples dropped since the last call of this,
        or since a step took samples."""
        lines = self.samples.drain_drops()
        self._dropped.update(line["reason"] for line in lines)
        return lines

    def reports(self, step: Step) -> list[Answered]:
        """What the calls of a step answered, those that made its samples ahead included: with them
        those of earlier chunks that were not reported yet, added up."""
        newest = max((sample.chunk for sample in step.samples.batch), default=-1)
        ahead: dict[str, Answered] = {}
        for chunk in sorted(number for number in self._reports if number <= newest):
            for name, answered in self._reports.pop(chunk).items():
                ahead[name] = ahead[name].and_then(answered) if name in ahead else answered
        in_order = [ahead[mfc.name] for mfc in self._before if mfc.name in ahead]
        return [*in_order, *step.reports_in(self._graph)]

    def numbers(self, step: Step) -> dict[str, float]:
        """Numbers for the metrics: on the samples that a step took, and the fate of others since
        the step before."""
        reasons = [reason for mfc in self._graph for reason in mfc.drops]
        if self.is_ahead:
            return {name: float(number) for name, number in self._numbers_ahead(step).items()}
        return step.samples.counts(reasons) if reasons else {}

    def _numbers_ahead(self, step: Step) -> dict[str, float]:
        samples, batch = self.samples, step.samples.batch
        lags = Counter(sample.staleness(step.number) for sample in batch)
        dropped = self._dropped + Counter(drop.reason for drop in step.samples.drops.values())
        expired, self._last_expired, self._dropped = (
            samples.expired - self._last_expired,
            samples.expired,
            Counter(),
        )
        numbers: dict[str, float] = {}
        for mfc in self._before:
            versions = [
                sample.versions[mfc.name] for sample in batch if mfc.name in sample.versions
            ]
            if versions:
                mean_lag = sum(step.number - version for version in versions) / len(versions)
                numbers[f"{mfc.model_name}/staleness"] = mean_lag
        numbers |= {
            "samples/ahead": samples.accepted
            - self.sizes.position(self._flow.versions.of(self._roles)),
            "samples/running": samples.running,
            "samples/ready": len(samples.ready),
            "samples/expired": expired,
            "samples/dropped": dropped.total(),
            "samples/retried": sum(sample.draw.attempt > 0 for sample in batch),
        }
        numbers |= {
            f"samples/dropped/{reason}": dropped[reason]
            for mfc in self._before
            for reason in mfc.drops
        }
        numbers |= {"staleness/min": min(lags), "staleness/max": max(lags)}
        allowed = range(samples.rule.max_staleness + 1)
        numbers |= {f"staleness/share_{lag}": lags[lag] / len(batch) for lag in allowed}
        return numbers | {f"queue/{call}": gate.waiting for call, gate in self._gates.items()}


async def make_supply(
    recipe: Recipe,
    calls: Calls,
    flow: Flow,
    rows: int | None,
    steps: int,
    start: Start | None,
    should_stop: Callable[[], bool],
) -> Supply:
    """`rows`: of the training dataset, None for a stream; `steps`: of the run."""
    train, graph, state = (
        recipe.train,
        train_graph(recipe),
        start.state if start is not None else None,
    )
    first, taken = (state.step, state.samples) if state is not None else (0, 0)
    end = rows * (train.epochs or 1) if rows is not None and recipe.takes_each_row_once else None
    sizes = StepSizes(rows, train.prompts_per_step, first, taken, end)
    before = calls_before_training(recipe)
    rule = _admission(recipe)
    ready = (
        await _restore(start, calls, graph, before)
        if start is not None and rule.max_staleness
        else []
    )
    if rows is not None:
        order = DataOrder(rows, recipe.seed, train.shuffle)
    else:
        order = DataOrder(state.pass_rows if state is not None else None, shuffle=False)
    samples = Samples(_queue(order, state, ready), before, rule, taken, ready, first)
    return Supply(recipe, calls, flow, samples, sizes, steps, should_stop)


def runs_ahead(recipe: Recipe) -> bool:
    """Whether samples are made ahead of all steps."""
    return bool(recipe.train.max_staleness and calls_ahead(train_graph(recipe)))


def calls_before_training(recipe: Recipe) -> list[MFCDef]:
    """The calls that samples go through before a step takes them: if generation may be stale, those
    that may run ahead of all steps; otherwise, if calls may drop samples, those that choose a
    batch. The others need the whole batch, or wait for calls that do."""
    graph = train_graph(recipe)
    if runs_ahead(recipe):
        return calls_ahead(graph)
    if not any(mfc.drops for mfc in graph):
        return []
    linked, of_step = CallGraph(graph), {mfc.name for mfc in graph if mfc.needs_batch}
    late = of_step.union(*(linked.after(name) for name in of_step))
    return [mfc for mfc in graph if mfc.name not in late]


def _admission(recipe: Recipe) -> Admission:
    train, replaces, is_ahead = recipe.train, bool(recipe.trained_roles), runs_ahead(recipe)
    chunk = train.prompts_per_draw
    if is_ahead:
        chunk = chunk or train.prompts_per_step
    elif not replaces or not calls_before_training(recipe):
        chunk = None
    return Admission(
        train.prompts_per_step,
        train.max_staleness if is_ahead else 0,
        chunk,
        train.max_redraws,
        takes_freshest=train.take_first == "freshest",
        replaces=replaces,
    )


async def _restore(
    start: Start, calls: Calls, graph: Sequence[MFCDef], before: Sequence[MFCDef]
) -> list[Ready]:
    """The samples of a checkpoint that need not be generated again: those that have all keys that
    the calls before training now produce."""
    if not start.state.ready:
        return []
    saved = [Ready.from_json(fields) for fields in start.state.ready]
    names = {
        sample.id: fields["name"] for sample, fields in zip(saved, start.state.ready, strict=True)
    }
    await calls.restore(graph, str(start.folder), names)
    produced = [key for mfc in before for key in mfc.produced_keys]
    lacking = {id_ for id_ in names if not calls.buffer.holders(id_, produced)}
    calls.forget(list(lacking))
    return [sample for sample in saved if sample.id not in lacking]


def _queue(order: DataOrder, state: RunState | None, ready: Sequence[Ready]) -> SampleQueue:
    """First the samples that a checkpoint had finished but that are no longer `ready`,
    then those it gives back."""
    if state is None:
        return SampleQueue(order)
    still_ready = {sample.id for sample in ready}
    finished = [Draw(*fields["draw"]) for fields in state.ready]
    again = [draw.again for draw in finished if draw.id not in still_ready]
    return SampleQueue(order, state.drawn, [*again, *(Draw(*fields) for fields in state.returned)])
