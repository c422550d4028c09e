"""Samples generated ahead of training: which are admitted, which are ready, and which have become too stale. Pure.

They are drawn in chunks. Each goes through the calls that need no batch, one call after the other; if several chunks
wait for a call, the oldest goes first. Training takes samples in the order of the weights that generated them, oldest
or newest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlcli.api.dataflow import MFCDef
from rlcli.errors import DataError
from rlcli.runtime.sample_flow import WHY_SO_MANY, Draw, Drop, SampleFlow, SampleQueue, reasons_of
from rlcli.runtime.scheduler import Scheduler, Task


@dataclass(frozen=True)
class Ready:
    """A sample that a training step may take."""

    draw: Draw
    versions: Mapping[str, int]
    """Generating call → training steps behind the weights that it sampled with. Only for weights that change."""
    chunk: int = -1
    """The chunk it was drawn with; -1 if it was drawn before the run was resumed."""

    @property
    def oldest(self) -> int:
        """The version of its oldest part."""
        return min(self.versions.values(), default=0)

    def as_json(self) -> dict[str, Any]:
        """The sample's entry in a checkpoint."""
        return {"draw": [self.draw.epoch, self.draw.row, self.draw.attempt], "versions": dict(self.versions)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Ready:
        return Ready(Draw(*fields["draw"]), fields["versions"])

    def staleness(self, step: int) -> int:
        """Training steps between the weights that generated it and those that step number `step` (from 0) trains."""
        return step - self.oldest if self.versions else 0


@dataclass(frozen=True)
class Limits:
    """How far ahead samples are generated."""

    max_staleness: int
    batch: int
    """Samples of a training step."""
    chunk: int
    """Samples drawn at a time."""
    max_redraws: int
    """How many batches of samples may be dropped before a step has its samples."""
    takes_freshest: bool = False
    """Whether a step takes the samples of the newest weights first, instead of the oldest."""


class Admission:
    """Every sample that was drawn and not trained on: in progress, ready, dropped, or waiting in the queue."""

    def __init__(self, queue: SampleQueue, calls: Sequence[MFCDef], limits: Limits, accepted: int = 0,
                 ready: Iterable[Ready] = ()):  # fmt: skip
        """`accepted`: samples that earlier steps have taken."""
        self.limits = limits
        self._queue = queue
        self._calls = calls
        self._flow = SampleFlow(queue, calls, replaces=False)
        self._scheduler = Scheduler(calls, steps=0, window=2**31, drops=True)
        self._loaded: set[int] = set()
        self._busy: set[str] = set()
        """Calls that work on a chunk: one at a time, so that new weights need not wait for all of them."""
        self._versions: dict[int, dict[str, int]] = {}
        self._ready = list(ready)
        self._taken: dict[str, Ready] = {}
        """Samples of the open steps."""
        self._past = accepted
        self._drops: dict[str, Drop] = {}
        """Samples dropped since the last step ended."""
        self._dropped_in_a_row: Counter[Drop] = Counter()
        self.expired = 0
        """Samples that were given back as too stale."""

    @property
    def running(self) -> int:
        """Samples in progress."""
        return self._flow.under_way

    @property
    def ready(self) -> tuple[Ready, ...]:
        """Finished samples that no step has taken."""
        return tuple(self._ready)

    @property
    def accepted(self) -> int:
        """Samples that were trained on or still may be: those neither dropped nor given back."""
        return self._past + len(self._ready) + self.running

    # -- generating ------------------------------------------------------------------------------------------

    def admit(self, limit: int) -> tuple[int, list[Draw]] | None:
        """Draw the next chunk: (its number, its samples). None if more than `limit` samples would be accepted.

        A chunk that is not full is drawn only if training waits for it."""
        size = min(self.limits.chunk, limit - self.accepted)
        is_awaited = not self.running and len(self._ready) < self.limits.batch
        if size <= 0 or (size < self.limits.chunk and not is_awaited):
            return None
        number = self._scheduler.steps
        self._scheduler.steps += 1
        self._versions[number] = {}
        return number, self._flow.open(number, size)

    def redraw(self, chunk: int, missing: Sequence[str], rows: int) -> list[Draw]:
        """Replace rows of a chunk that lie beyond the end of a stream of `rows` rows; returns the replacements."""
        self._queue.pass_ended(rows)
        return self._flow.redraw(chunk, missing, self._queue.instead_of)

    def loaded(self, chunk: int) -> None:
        """The rows of a chunk are on the workers."""
        self._loaded.add(chunk)

    def startable(self) -> list[Task]:
        """Calls that may start on a chunk (the task's step) now, at most one chunk per call."""
        first: dict[str, Task] = {}
        for task in self._scheduler.ready():
            if task.step in self._loaded and task.call not in self._busy:
                first.setdefault(task.call, task)
        return list(first.values())

    def start(self, task: Task) -> list[str]:
        """Start a call; returns the samples that it works on, possibly none."""
        self._scheduler.start(task)
        self._busy.add(task.call)
        return self._flow.samples(task.step, task.call)

    def finish(self, task: Task, dropped: Mapping[str, str], version: int | None = None) -> list[str]:
        """A call is done with a chunk. `dropped`: sample → why; `version`: of the weights that it generated with.

        Returns the samples that are no longer needed.

        Raises DataError F80 if more samples were dropped than training can wait for.
        """
        chunk = task.step
        self._busy.discard(task.call)
        self._flow.drop(chunk, task.call, dropped)
        if version is not None:
            self._versions[chunk][task.call] = version
        self._scheduler.finish(task)
        return self._end(chunk) if self._scheduler.chooses(chunk) else []

    def _end(self, chunk: int) -> list[str]:
        self._flow.complete(chunk)
        self._scheduler.close(chunk)
        self._loaded.discard(chunk)
        made, versions = self._flow.close(chunk), self._versions.pop(chunk)
        self._ready += [Ready(draw, versions, chunk) for draw in made.kept]
        self._drops |= made.drops
        self._dropped_in_a_row.update(made.drops.values())
        most = (self.limits.max_redraws + 1) * self.limits.batch
        if self._dropped_in_a_row.total() > most:
            raise self._too_many()
        return list(made.drops)

    def _too_many(self) -> DataError:
        drops, there = self._dropped_in_a_row, f"{len(self._ready)} of the {self.limits.batch} of a batch are there"
        reasons = ", ".join(reasons_of(drops, [mfc.name for mfc in self._calls]))
        return DataError(
            f"{there}, and {drops.total()} samples were dropped since the last step began; dropped: {reasons}",
            where=", ".join(dict.fromkeys(f"graph.{drop.call}" for drop in drops)),
            hint=f"raise train.max_redraws, or {WHY_SO_MANY}",
            code="F80",
        )

    def has(self, count: int) -> bool:
        """Whether at least `count` samples are ready."""
        return len(self._ready) >= count

    # -- training --------------------------------------------------------------------------------------------

    def expire(self, step: int) -> list[str]:
        """Give back samples that are too stale for step number `step`; returns them."""
        limit = self.limits.max_staleness
        stale = [one.draw for one in self._ready if one.staleness(step) > limit]
        self._ready = [one for one in self._ready if one.staleness(step) <= limit]
        self._queue.give_back(stale)
        self.expired += len(stale)
        return [draw.id for draw in stale]

    def take(self, count: int) -> list[Draw]:
        """The samples of the next step: `count` of those that are ready; at least that many must be."""
        sign = -1 if self.limits.takes_freshest else 1
        in_order = sorted(self._ready, key=lambda one: (sign * one.oldest, one.chunk))
        batch, self._ready = in_order[:count], in_order[count:]
        assert len(batch) == count, f"{count} samples were wanted, {len(batch)} are ready"
        self._taken |= {one.draw.id: one for one in batch}
        self._past += count
        self._dropped_in_a_row.clear()
        return [one.draw for one in batch]

    def give_back(self, draws: Sequence[Draw]) -> None:
        """A step does not need these samples: they are ready for the next one."""
        self._ready += [self._taken.pop(draw.id) for draw in draws]
        self._past -= len(draws)

    def ages(self, ids: Iterable[str], step: int) -> dict[str, int]:
        """Sample of open step number `step` → its staleness."""
        return {id_: self._taken[id_].staleness(step) for id_ in ids}

    def let_go(self, ids: Iterable[str]) -> list[Ready]:
        """A step is done with its samples; returns what is known of them."""
        return [self._taken.pop(id_) for id_ in ids]

    # -- reporting -------------------------------------------------------------------------------------------

    def drain_drops(self) -> list[dict[str, Any]]:
        """Ledger entries: the samples dropped since the last call of this."""
        drops, self._drops = self._drops, {}
        return [{"sample": id_, "state": "dropped", **asdict(drop)} for id_, drop in drops.items()]

    def waiting(self) -> tuple[Draw, ...]:
        """What a run that resumes from here draws first: the samples in progress, then the queue's."""
        return (*(draw.again for draw in self._flow.unfinished), *self._queue.returned)

    def depths(self) -> dict[str, int]:
        """Call → number of samples waiting for it."""
        waiting = Counter(
            task.call for task in self._scheduler.ready() for _ in self._flow.samples(task.step, task.call)
        )
        return {mfc.name: waiting[mfc.name] for mfc in self._calls}
