"""Which samples a step trains on: drawn in data order, dropped by calls, replaced by the next ones. Pure.

Nothing here depends on when an answer arrives: the samples of a step, and their positions in its batch, follow from the
order of the data and from which samples were dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from rlcli.api.dataflow import CallGraph, MFCDef
from rlcli.errors import DataError, UsageError
from rlcli.runtime.data_order import DataOrder, StreamOrder, training_id

WHY_SO_MANY = "look into why: with rewards that are all equal, the prompts are too easy or too hard for the model"


@dataclass(frozen=True)
class Draw:
    """A row of an epoch, drawn to become a sample."""

    epoch: int
    row: int
    attempt: int = 0
    """How many times it was begun before."""

    @property
    def id(self) -> str:
        """Id of the sample that it becomes."""
        return training_id(self.epoch, self.row)

    @property
    def again(self) -> Draw:
        """The next attempt."""
        return replace(self, attempt=self.attempt + 1)


class Source(Protocol):
    """Where the samples of a step come from."""

    def take(self, count: int) -> list[Draw]:
        """Take the next ones."""

    def give_back(self, draws: Sequence[Draw]) -> None:
        """Return samples that were not needed."""


class SampleQueue:
    """What is drawn next: first the samples that were given back, then the data in order."""

    def __init__(self, order: DataOrder | StreamOrder, place: int = 0, returned: Iterable[Draw] = ()):
        self.place = place
        """Position in the data order of the first row that was never drawn."""
        self._order = order
        self._returned = deque(returned)

    @property
    def returned(self) -> tuple[Draw, ...]:
        """Samples that come before the rows that were never drawn."""
        return tuple(self._returned)

    def take(self, count: int) -> list[Draw]:
        old = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
        new = [Draw(*self._order.at(self.place + number)) for number in range(count - len(old))]
        self.place += len(new)
        return old + new

    @property
    def pass_rows(self) -> int | None:
        """Rows of a pass over the data, if known."""
        return self._order.rows

    def pass_ended(self, rows: int) -> None:
        """Record how many rows a pass over a stream has."""
        assert isinstance(self._order, StreamOrder)
        self._order.rows = rows

    def instead_of(self, draw: Draw) -> Draw:
        """The row to draw instead of one that turned out to be missing in the first pass over a stream."""
        return Draw(*self._order.at(draw.row), draw.attempt)

    def put_back(self, draws: Sequence[Draw]) -> None:
        """Return them to the front, in order, as if they had not been taken."""
        self._returned.extendleft(reversed(draws))

    def give_back(self, draws: Sequence[Draw]) -> None:
        """Return them to the front, in order, to be begun once more."""
        self.put_back([draw.again for draw in draws])


@dataclass(frozen=True)
class Drop:
    """Why a sample is not trained on."""

    call: str
    reason: str


def reasons_of(counts: Mapping[Drop, int], calls: Sequence[str]) -> list[str]:
    """`filter 3 (equal_rewards)`: how many samples each call dropped for each reason, in the order of the calls."""
    in_order = sorted(counts.items(), key=lambda pair: calls.index(pair[0].call))
    return [f"{drop.call} {count} ({drop.reason})" for drop, count in in_order]


@dataclass
class Step:
    """The samples of one step, from the first draw to the batch."""

    size: int
    """Samples of a full batch."""
    draws: list[list[Draw]] = field(default_factory=list)
    """In data order; the calls before training process one draw after the other."""
    drops: dict[str, Drop] = field(default_factory=dict)
    """Sample → why it was dropped."""
    batch: list[str] | None = None
    """The samples to train on; None until the batch is complete."""

    @property
    def drawn(self) -> list[Draw]:
        return [one for draw in self.draws for one in draw]

    @property
    def kept(self) -> list[Draw]:
        """Samples that no call has dropped."""
        return [one for one in self.drawn if one.id not in self.drops]

    def counts(self, reasons: Iterable[str]) -> dict[str, float]:
        """Counts for the metrics: samples that were drawn, dropped (for each of `reasons`), drawn as replacements, and
        given back."""
        dropped = Counter(drop.reason for drop in self.drops.values())
        counts = {"drawn": len(self.drawn), "dropped": len(self.drops), "redrawn": len(self.drawn) - len(self.draws[0])}
        counts |= {"returned": len(self.kept) - len(self.batch or ())}
        counts |= {f"dropped/{reason}": dropped[reason] for reason in reasons}
        return {f"samples/{name}": float(count) for name, count in counts.items()}

    def ledger(self, state: str, versions: Mapping[str, Mapping[str, int]]) -> Iterator[dict[str, Any]]:
        """One line for each finished sample: `state` and the versions of the weights that generated it, or why it was
        dropped."""
        batch = set(self.batch or ())
        for id_ in (draw.id for draw in self.drawn):
            if id_ in batch:
                yield {"sample": id_, "state": state, "versions": dict(versions[id_])}
            elif id_ in self.drops:
                yield {"sample": id_, "state": "dropped", **asdict(self.drops[id_])}


class SampleFlow:
    """The samples of the open steps of a run.

    Without calls that may drop samples, a step is one draw. With them, steps are drawn one after the other: a step
    whose batch lacks samples draws again, and what it does not need goes back to the queue before the next is drawn.
    """

    def __init__(
        self,
        queue: Source,
        graph: Sequence[MFCDef],
        *,
        replaces: bool,
        per_draw: int | None = None,
        most_redraws: int = 0,
    ):
        """`replaces`: dropped samples are replaced, so that every batch is full. `per_draw`: samples to draw at a time;
        None: as many as the batch lacks. `most_redraws`: maximum draws of a step after its first one."""
        self.queue = queue
        self.drops = any(mfc.drops for mfc in graph)
        """Whether calls may drop samples."""
        self._replaces = replaces
        self._per_draw = per_draw if self.drops and replaces else None
        self._most_redraws = most_redraws
        self._ranks = {mfc.name: rank for rank, mfc in enumerate(graph)}
        linked = CallGraph(graph)
        self._before = {mfc.name: linked.before(mfc.name) for mfc in graph}
        self._steps: dict[int, Step] = {}

    @property
    def under_way(self) -> int:
        """Samples drawn for the open steps and not dropped: those in progress, or waiting to be trained on."""
        return sum(sum(map(len, step.draws)) - len(step.drops) for step in self._steps.values())

    @property
    def unfinished(self) -> list[Draw]:
        """The samples of the open steps, including dropped ones."""
        return [draw for step in self._steps.values() for draw in step.drawn]

    def may_open(self, step: int) -> bool:
        """Whether it is known which samples come before those of a step."""
        return not self.drops or all(other.batch is not None for other in self._steps.values())

    def open(self, step: int, size: int) -> list[Draw]:
        """The first draw of a step whose batch takes `size` samples."""
        self._steps[step] = Step(size)
        drawn = self._draw(step)
        if not self.drops:
            self._steps[step].batch = [draw.id for draw in drawn]
        return drawn

    def redraw(self, step: int, missing: Sequence[str], instead_of: Callable[[Draw], Draw]) -> list[Draw]:
        """Replace rows that a step has drawn but that do not exist; returns the replacements."""
        state = self._steps[step]
        others = {draw.id: instead_of(draw) for draw in state.draws[-1] if draw.id in missing}
        state.draws[-1] = [others.get(draw.id, draw) for draw in state.draws[-1]]
        if state.batch is not None:
            state.batch = [draw.id for draw in state.draws[-1]]
        return list(others.values())

    def samples(self, step: int, call: str) -> list[str]:
        """The samples that a call works on: the batch, once it is complete; until then the samples of the last draw
        that were kept by the calls it waits for."""
        state, before = self._steps[step], self._before[call]
        if state.batch is not None:
            return state.batch
        dropped = {id_ for id_, drop in state.drops.items() if drop.call in before}
        return [draw.id for draw in state.draws[-1] if draw.id not in dropped]

    def drop(self, step: int, call: str, reasons: Mapping[str, str]) -> None:
        """Count samples as dropped by a call. If several calls drop a sample, the first in the graph counts.

        Raises UsageError R71 if training has begun.
        """
        state = self._steps[step]
        if reasons and state.batch is not None and self.drops:
            what = f"{call} drops samples of a batch that is complete"
            raise UsageError(what, hint="drop samples in a call that comes before training", code="R71")
        for id_, reason in reasons.items():
            earlier = state.drops.get(id_)
            if earlier is None or self._ranks[call] < self._ranks[earlier.call]:
                state.drops[id_] = Drop(call, reason)

    def complete(self, step: int) -> list[Draw]:
        """All calls before training are done with the last draw: draw again, or declare the batch complete.

        Raises DataError F80 if the step would need more draws than it may make.
        """
        state = self._steps[step]
        kept = state.kept
        if self._replaces and len(kept) < state.size:
            if len(state.draws) > self._most_redraws:
                raise self._too_few(step, state)
            return self._draw(step)
        state.batch = [draw.id for draw in kept[: state.size]]
        self.queue.give_back(kept[state.size :])
        return []

    def surplus(self, step: int) -> list[str]:
        """The samples that were drawn for a step but are not in its batch."""
        state = self._steps[step]
        batch = set(state.batch or ())
        return [draw.id for draw in state.drawn if draw.id not in batch]

    def close(self, step: int) -> Step:
        """End a step; returns its samples."""
        return self._steps.pop(step)

    def _draw(self, step: int) -> list[Draw]:
        state = self._steps[step]
        drawn = self.queue.take(self._per_draw or state.size - len(state.kept))
        state.draws.append(drawn)
        return drawn

    def _too_few(self, step: int, state: Step) -> DataError:
        left, drawn, times = len(state.kept), len(state.drawn), len(state.draws)
        draws = f"{times} draw{'s' if times > 1 else ''}"
        reasons = reasons_of(Counter(state.drops.values()), list(self._ranks))
        few = f"{left} of the {state.size} samples of a batch are" if left else "the batch is empty: no sample is"
        return DataError(
            f"step {step + 1}: {few} left of {drawn} in {draws}; dropped: {', '.join(reasons)}",
            where=", ".join(dict.fromkeys(f"graph.{drop.call}" for drop in state.drops.values())),
            hint=f"raise train.max_redraws or train.prompts_per_draw, or {WHY_SO_MANY}",
            code="F80",
        )
