"""Where the samples of a training step come from: its own calls, or calls that run ahead of all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from rlcli.api.dataflow import MFCDef, calls_ahead
from rlcli.recipe.graph import train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.admission import Admission, Ready
from rlcli.runtime.answered import Answered
from rlcli.runtime.calls import Calls
from rlcli.runtime.checkpoints import RunState, Start
from rlcli.runtime.data_order import DataOrder, StepSizes, StreamOrder
from rlcli.runtime.finished_step import FinishedStep
from rlcli.runtime.rollouts import Rollouts
from rlcli.runtime.sample_flow import Draw, SampleFlow, SampleQueue
from rlcli.runtime.scheduler import Scheduler


@dataclass(frozen=True)
class Flows:
    """Decides which samples go where, and when."""

    sizes: StepSizes
    queue: SampleQueue
    rollouts: Rollouts | None
    """Generates samples ahead of training; None if each step generates its own."""
    samples: SampleFlow
    """Samples of the open steps."""
    scheduler: Scheduler
    """Schedules the calls within steps."""
    epochs: int | None = None
    """Passes over the data after which the run ends if samples may be dropped, perhaps before the planned steps."""

    @property
    def is_used_up(self) -> bool:
        """Whether no step is left, because all rows of the epochs were trained on or dropped."""
        rollouts = self.rollouts
        under_way = rollouts is not None and (rollouts.admission.running or rollouts.admission.ready)
        return self._are_rows_drawn and not under_way

    @property
    def _are_rows_drawn(self) -> bool:
        if self.epochs is None or self.sizes.rows is None or self.queue.place < self.epochs * self.sizes.rows:
            return False
        return all(draw.epoch >= self.epochs for draw in self.queue.returned)

    def run_ahead(self) -> None:
        """Keep samples in progress: as many as later steps may take, and no more than the run needs."""
        if self.rollouts is not None:
            version = self.scheduler.version(self.rollouts.roles)
            self.rollouts.advance(self._limit(version, self.rollouts.admission))

    def ages(self, step: int, ids: Sequence[str]) -> dict[str, int] | None:
        """Sample of an open step → its staleness; None if each step generates its own."""
        return self.rollouts.admission.ages(ids, step) if self.rollouts is not None else None

    def close(self, step: int, calls: Sequence[Answered]) -> FinishedStep:
        """End a step, whose own calls these were."""
        samples, ahead = self.samples.close(step), None
        if self.rollouts is not None:
            ahead = self.rollouts.close(step, samples.batch or [], self.scheduler.version(self.rollouts.roles))
        return FinishedStep(samples, calls, ahead)

    def _limit(self, version: int, admission: Admission) -> int:
        """How many samples may be accepted while weights of `version` generate them. Once all rows are drawn: as many
        as fill the last batch."""
        most = self.sizes.place(min(version + admission.limits.max_staleness + 1, self.scheduler.steps))
        if not self._are_rows_drawn:
            return most
        return min(most, next(place for k in count(version) if (place := self.sizes.place(k)) >= admission.accepted))


def make_flows(recipe: Recipe, calls: Calls, rows: int | None, steps: int, start: Start | None, window: int) -> Flows:
    """`rows`: of the training dataset, None for a stream; `steps`: of the run; `window`: most steps open at once.

    If generation may be stale, the calls before training run ahead of all steps; the steps run only the other calls.
    """
    train, graph, state = recipe.train, train_graph(recipe), start.state if start is not None else None
    first, place = (state.step, state.samples) if state is not None else (0, 0)
    end = rows * (train.epochs or 1) if rows is not None and recipe.takes_each_row_once else None
    sizes = StepSizes(rows, train.prompts_per_step, first, place, end)
    ahead = calls_ahead(graph) if train.max_staleness else []
    in_steps = [mfc for mfc in graph if mfc not in ahead]
    ready = _finished(start, calls, graph, ahead)
    order: DataOrder | StreamOrder = StreamOrder(state.pass_rows if state is not None else None)
    if rows is not None:
        order = DataOrder(rows, recipe.seed, train.shuffle)
    queue = _queue(order, state, ready)
    rollouts = Rollouts(recipe, ahead, queue, calls, sizes, ready) if ahead else None
    samples = SampleFlow(
        rollouts.admission if rollouts is not None else queue, in_steps,
        replaces=bool(recipe.trained_roles), per_draw=train.prompts_per_draw, most_redraws=train.max_redraws,
    )  # fmt: skip
    scheduler = Scheduler(in_steps, steps, first, window, drops=samples.drops)
    may_be_short = recipe.trained_roles and any(mfc.drops for mfc in graph)
    return Flows(sizes, queue, rollouts, samples, scheduler, train.epochs if may_be_short else None)


def _finished(start: Start | None, calls: Calls, graph: Sequence[MFCDef], ahead: Sequence[MFCDef]) -> list[Ready]:
    """The samples of a checkpoint that need not be generated again: none if nothing runs ahead, and none that lacks a
    key that the calls now produce."""
    if start is None or not ahead or not start.state.ready:
        return []
    saved = [Ready.from_json(fields) for fields in start.state.ready]
    names = {one.draw.id: fields["name"] for one, fields in zip(saved, start.state.ready, strict=True)}
    calls.restore(graph, str(start.folder), names)
    made = [key for mfc in ahead for key in mfc.produced_keys]
    lacking = {id_ for id_ in names if not calls.buffer.holders(id_, made)}
    calls.forget(list(lacking))
    return [one for one in saved if one.draw.id not in lacking]


def _queue(order: DataOrder | StreamOrder, state: RunState | None, ready: Sequence[Ready]) -> SampleQueue:
    """First the samples that a checkpoint had finished but that are no longer `ready`, then those it gives back."""
    if state is None:
        return SampleQueue(order)
    kept = {one.draw.id for one in ready}
    again = [draw.again for draw in (Draw(*fields["draw"]) for fields in state.ready) if draw.id not in kept]
    return SampleQueue(order, state.drawn, [*again, *(Draw(*one) for one in state.returned)])
