"""Supplies training steps with samples: draws them and has them go through the calls before
training.

At staleness 0 a step draws its own when it opens. Above that samples are made ahead of all steps,
which take those that are ready.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from rlcli.api.dataflow import MFCDef
from rlcli.checkpoint.run_state import RunState, Start
from rlcli.errors import DataError
from rlcli.recipe.schema import Recipe
from rlcli.runtime.calls import Calls
from rlcli.runtime.chunks import Chunk, Ready, StepSamples
from rlcli.runtime.data_order import DataOrder, StepSizes, training_id
from rlcli.runtime.draws import Draw, SampleQueue
from rlcli.runtime.flow import Batch, Flow, Gate
from rlcli.runtime.report import Answered, add_report
from rlcli.runtime.samples import Admission, Samples
from rlcli.topology.stages import Stages


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
        stages: Stages,
        calls: Calls,
        flow: Flow,
        rows: int | None,
        steps: int,
        state: RunState,
        ready: Sequence[Ready],
        should_stop: Callable[[], bool],
    ):
        """`rows`: of the training dataset, None for a stream; `steps`: of the run; `state`: what it
        resumes from; `ready`: samples of the state that steps may still take."""
        self.sizes = _sizes(recipe, rows, state)
        self.samples = Samples(
            _queue(recipe, rows, state, ready),
            stages.before,
            _admission(recipe, stages),
            state.samples,
            ready,
            state.step,
        )
        self.failure: DataError | None = None
        """Why no further step can begin: too many samples were dropped."""
        self._stages = stages
        self._calls = calls
        self._flow = flow
        self._steps = steps
        self._should_stop = should_stop
        self._dataset = recipe.train.dataset
        self._epochs = _epochs_at_most(recipe, stages.graph)
        one_by_one = [mfc.name for mfc in stages.before if mfc.model_name not in calls.pausing]
        self._gates = {name: Gate() for name in one_by_one} if stages.is_ahead else {}
        self._reports: dict[int, dict[str, Answered]] = {}
        """Chunk → what its calls answered, if no step has reported it."""
        self._last_expired = 0

    @property
    def is_used_up(self) -> bool:
        """Whether no step is left, because all rows of the epochs were trained on or dropped."""
        return self._are_rows_drawn and not self.samples.running and not self.samples.ready

    @property
    def _are_rows_drawn(self) -> bool:
        queue = self.samples.queue
        return queue.position >= self._end and all(
            draw.epoch >= self._epochs for draw in queue.returned
        )

    @property
    def _end(self) -> float:
        """Rows of all epochs."""
        return math.inf if self.sizes.rows is None else self._epochs * self.sizes.rows

    # -- making samples ----------------------------------------------------------------------------

    async def next_step(self, number: int) -> Step | None:
        """A step with its samples, once they are ready; None if the run ends before it."""
        step, size = Step(f"step {number + 1}", StepSamples([]), number), self.sizes.size(number)
        if self._stages.is_ahead:
            await self._flow.progress.until(lambda: self._is_over or self._has(size, number))
        elif not self._is_over:
            await self._make_batch(size, step)
        if self._is_over:
            return None
        step.samples = self.samples.take(size)
        self._calls.forget(step.samples.surplus)
        self._flow.progress.note()
        if self._stages.is_ahead:
            step.ages = {sample.id: sample.staleness(number) for sample in step.samples.batch}
        return step

    async def make_ahead(self) -> None:
        """Keep samples in progress, as many as later steps may take, and no more than the run
        needs. Never ends, unless each step makes its own."""
        if not self._stages.is_ahead:
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
        return None if is_over else self.samples.admit(self._limit(), self._version)

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
        await self._flow.go_through(self._stages.before, batch)
        try:
            dropped = self.samples.end(chunk, batch.versions, batch.segments)
        except DataError as error:
            self.failure, dropped = error, []
        self._calls.forget(dropped)
        if self._stages.is_ahead:
            self._reports[chunk.number] = batch.reports
        self._flow.progress.note()

    async def _load(self, chunk: Chunk) -> None:
        """Have its rows loaded; those that a stream turns out not to have are replaced."""
        draws = chunk.draws
        while draws:
            rows = [(draw.id, draw.row, draw.attempt) for draw in draws]
            missing, length = await self._calls.load(self._stages.graph, self._dataset, rows)
            draws = self.samples.redraw(chunk, missing, length) if missing else []

    @property
    def _version(self) -> int:
        """The version of the weights that generate."""
        return self._flow.versions.of(self._stages.sampling_roles)

    def _limit(self) -> float:
        """How many samples may be accepted while the current weights generate them. Once all
        rows are drawn: as many as fill the last batch, which is known when none is in progress."""
        version = self._version
        newest = min(version + self.samples.rule.max_staleness + 1, self._steps)
        most = self.sizes.position(newest)
        if not self._are_rows_drawn:
            return min(most, self.samples.accepted + self._rows_left)
        if self.samples.running:
            return 0
        ends_of_steps = (self.sizes.position(step) for step in count(version))
        return min(most, next(end for end in ends_of_steps if end >= self.samples.accepted))

    @property
    def _rows_left(self) -> float:
        """Rows of the epochs that may still be drawn: no chunk reaches beyond them."""
        queue = self.samples.queue
        return max(0, self._end - queue.position) + len(queue.returned)

    @property
    def _is_over(self) -> bool:
        is_stopped = self._stages.is_ahead and self._should_stop()
        return self.failure is not None or self.is_used_up or is_stopped

    def _has(self, size: int, step: int) -> bool:
        """Whether a step can begin. Samples that have become too stale for it are given back."""
        if not self.samples.has(size) or self.samples.waits_for(step):
            return False
        if stale := self.samples.expire(step):
            self._calls.forget(stale)
            self._flow.progress.note()  # there is room for others
        return self.samples.has(size)

    # -- reporting ---------------------------------------------------------------------------------

    def ready_names(self) -> dict[str, str]:
        """Sample that no step has taken → its dataset's name for it."""
        return self._calls.names([sample.id for sample in self.samples.ready])

    def as_state(self, step: int, ready: Mapping[str, str]) -> dict[str, Any]:
        """What a run that resumes after `step` steps must know; `ready`: see `ready_names`."""
        samples, queue = self.samples, self.samples.queue
        return {
            "samples": self.sizes.position(step),
            "drawn": queue.position,
            "pass_rows": queue.pass_rows,
            "returned": list(samples.waiting()),
            "ready": [sample.as_json() | {"name": ready[sample.id]} for sample in samples.ready],
        }

    def reports(self, step: Step) -> list[Answered]:
        """The answers of a step's calls, including those that made its samples ahead and those of
        earlier chunks that were not reported yet, added up."""
        newest = max((sample.chunk for sample in step.samples.batch), default=-1)
        ahead: dict[str, Answered] = {}
        for chunk in sorted(number for number in self._reports if number <= newest):
            for answered in self._reports.pop(chunk).values():
                add_report(ahead, answered)
        in_order = [ahead[mfc.name] for mfc in self._stages.before if mfc.name in ahead]
        return [*in_order, *step.reports_in(self._stages.graph)]

    def numbers(self, step: Step) -> dict[str, float]:
        """Numbers for the metrics: on the samples that a step took, and the fate of others since
        the step before."""
        if self._stages.is_ahead:
            numbers = _lags_of_roles(step, self._stages.before) | self._fates(step)
            numbers |= _lags(step, self.samples.rule.max_staleness) | _segments(step)
            numbers |= {f"queue/{call}": gate.waiting for call, gate in self._gates.items()}
            return {name: float(number) for name, number in numbers.items()}
        reasons = [reason for mfc in self._stages.graph for reason in mfc.drops]
        return step.samples.counts(reasons) if reasons else {}

    def _fates(self, step: Step) -> dict[str, float]:
        """What became of the samples made ahead, since the step before."""
        samples = self.samples
        expired, self._last_expired = samples.expired - self._last_expired, samples.expired
        dropped = step.samples.dropped
        retried = sum(sample.draw.attempt > 0 for sample in step.samples.batch)
        reasons = [reason for mfc in self._stages.before for reason in mfc.drops]
        return {
            "samples/ahead": samples.accepted - self.sizes.position(self._version),
            "samples/running": samples.running,
            "samples/ready": len(samples.ready),
            "samples/expired": expired,
            "samples/dropped": dropped.total(),
            "samples/retried": retried,
            **{f"samples/dropped/{reason}": dropped[reason] for reason in reasons},
        }


def _epochs_at_most(recipe: Recipe, graph: Sequence[MFCDef]) -> float:
    """Passes over the data after which the run ends if samples may be dropped, perhaps before the
    planned steps."""
    may_be_short = recipe.trained_roles and any(mfc.drops for mfc in graph)
    epochs = recipe.train.epochs if may_be_short else None
    return math.inf if epochs is None else epochs


def _lags(step: Step, most: int) -> dict[str, float]:
    """How many steps the weights that generated a step's samples lag, at `most`."""
    batch = step.samples.batch
    lags = Counter(sample.staleness(step.number) for sample in batch)
    shares = {f"staleness/share_{lag}": lags[lag] / len(batch) for lag in range(most + 1)}
    return {"staleness/min": min(lags), "staleness/max": max(lags), **shares}


def _segments(step: Step) -> dict[str, float]:
    """For responses that were sampled while weights may have changed: how many segments they have,
    and the ages of their tokens."""
    responses = [response for sample in step.samples.batch for response in sample.segments]
    if not responses:
        return {}
    tokens = Counter[int]()
    for version, length in (segment for response in responses for segment in response):
        tokens[step.number - version] += length
    counts = [len(response) for response in responses]
    ages = {f"staleness/tokens_{age}": tokens[age] / tokens.total() for age in sorted(tokens)}
    return {"segments/mean": sum(counts) / len(counts), "segments/max": max(counts), **ages}


def _lags_of_roles(step: Step, before: Sequence[MFCDef]) -> dict[str, float]:
    """`<role>/staleness`: mean lag of a generating role's weights."""
    lags: dict[str, float] = {}
    for mfc in before:
        of_call = [
            step.number - sample.versions[mfc.name]
            for sample in step.samples.batch
            if mfc.name in sample.versions
        ]
        if of_call:
            lags[f"{mfc.model_name}/staleness"] = sum(of_call) / len(of_call)
    return lags


def _sizes(recipe: Recipe, rows: int | None, state: RunState) -> StepSizes:
    end = None
    if rows is not None and recipe.takes_each_row_once:
        end = rows * (recipe.train.epochs or 1)
    return StepSizes(rows, recipe.train.prompts_per_step, state.step, state.samples, end)


def _queue(
    recipe: Recipe, rows: int | None, state: RunState, ready: Sequence[Ready]
) -> SampleQueue:
    """First the samples that a checkpoint had finished but that are no longer `ready`,
    then those it gives back."""
    if rows is None:
        order = DataOrder(state.pass_rows, shuffle=False)
    else:
        order = DataOrder(rows, recipe.seed, recipe.train.shuffle)
    still_ready = {sample.id for sample in ready}
    finished = [Draw(*fields["draw"]) for fields in state.ready]
    again = [draw.again for draw in finished if draw.id not in still_ready]
    return SampleQueue(order, state.drawn, [*again, *(Draw(*fields) for fields in state.returned)])


def _admission(recipe: Recipe, stages: Stages) -> Admission:
    train, replaces = recipe.train, bool(recipe.trained_roles)
    chunk = train.prompts_per_draw
    if stages.is_ahead:
        chunk = chunk or train.prompts_per_step
    elif not replaces or not stages.before:
        chunk = None
    return Admission(
        train.prompts_per_step,
        train.max_staleness if stages.is_ahead else 0,
        chunk,
        train.max_redraws,
        takes_freshest=train.take_first == "freshest",
        replaces=replaces,
    )


async def restored_samples(start: Start, calls: Calls, stages: Stages) -> list[Ready]:
    """The samples of a checkpoint that need not be generated again: those that have all keys that
    the calls before training now produce."""
    if not start.state.ready or not stages.is_ahead:
        return []
    saved = [Ready.from_json(fields) for fields in start.state.ready]
    names = {training_id(*fields["draw"][:2]): fields["name"] for fields in start.state.ready}
    await calls.restore(stages.graph, str(start.folder), names)
    produced = [key for mfc in stages.before for key in mfc.produced_keys]
    lacking = {id_ for id_ in names if not calls.buffer.holders(id_, produced)}
    calls.forget(list(lacking))
    return [sample for sample in saved if sample.id not in lacking]
