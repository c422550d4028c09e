"""What becomes of every sample: it is queued, drawn, ready,
and taken by a training step or dropped. Pure.

Samples are drawn in chunks. A chunk goes through the calls that need no batch; those of its samples
that no call drops are then ready. A step takes a batch of them. One rule admits samples: those
accepted, in progress included, never exceed what may be trained on within `max_staleness` of the
weights that generate them.

At staleness 0 nothing here depends on when an answer arrives: a step draws until its batch is full,
in the order of the data, and what it does not need goes back to the front of the queue. Above that,
samples stay ready for later steps, which take them in the order of the weights that generated them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.api.dataflow import CallGraph, MFCDef
from rlcli.api.output_checks import Segments
from rlcli.errors import DataError
from rlcli.runtime.chunks import Chunk, Ready, StepSamples, dropped_line, unreported
from rlcli.runtime.draws import Draw, SampleQueue
from rlcli.units import count

WHY_SO_MANY = (
    "look into why: with rewards that are all equal, the prompts are too easy or "
    "too hard for the model"
)


@dataclass(frozen=True)
class Admission:
    """How many samples are drawn, and when."""

    batch: int
    """Samples of a training step."""
    max_staleness: int = 0
    """By how many training steps the weights that generate a sample may lag those that it
    trains."""
    chunk: int | None = None
    """Samples drawn at a time; None: as many as are admitted."""
    max_redraws: int = 0
    """Above staleness 0: how many batches of samples may be dropped before a step has its samples.
    At 0: how many times a step may draw again."""
    takes_freshest: bool = False
    """Whether a step takes the samples of the newest weights first, instead of the oldest."""
    replaces: bool = True
    """Whether dropped samples are replaced, so that every batch is full."""

    def size(self, room: int, is_awaited: bool) -> int:
        """Samples of the next chunk, 0 if it has to wait, if `room` more may be accepted.
        `is_awaited`: training waits for it."""
        if room <= 0 or self.chunk is None:
            return max(room, 0)
        if not self.max_staleness:  # the surplus goes back to the queue
            return self.chunk
        return min(self.chunk, room) if room >= self.chunk or is_awaited else 0


class Samples:
    """Every sample that was drawn: in progress, ready, taken, dropped,
    or back in the queue."""

    def __init__(
        self,
        queue: SampleQueue,
        calls: Sequence[MFCDef],
        rule: Admission,
        accepted: int = 0,
        ready: Iterable[Ready] = (),
        step: int = 0,
    ):
        """`calls`: those that a chunk goes through; `accepted`: samples that the steps before
        `step` have taken."""
        self.queue = queue
        self.rule = rule
        self.expired = 0
        """Samples that were given back as too stale."""
        graph = CallGraph(calls)
        self._before = {mfc.name: graph.before(mfc.name) for mfc in calls}
        self._in_progress: dict[int, Chunk] = {}
        self._next_chunk = 0
        self._ready = list(ready)
        self._past = accepted
        self.step = step
        """The step that takes samples next."""
        self._ended: list[Chunk] = []
        """Chunks that are done since the last step took samples."""

    @property
    def running(self) -> int:
        """Samples in progress."""
        return sum(len(chunk.draws) - len(chunk.drops) for chunk in self._in_progress.values())

    @property
    def ready(self) -> tuple[Ready, ...]:
        """Finished samples that no step has taken."""
        return tuple(self._ready)

    @property
    def accepted(self) -> int:
        """Samples that were taken or still may be: those neither dropped nor given back."""
        return self._past + len(self._ready) + self.running

    def has(self, count: int) -> bool:
        """Whether at least `count` samples are ready."""
        return len(self._ready) >= count

    def waiting(self) -> tuple[Draw, ...]:
        """What a run that resumes from here draws first: the samples in progress,
        then the queue's."""
        unfinished = (draw.again for chunk in self._in_progress.values() for draw in chunk.draws)
        return (*unfinished, *self.queue.returned)

    # -- before training ---------------------------------------------------------------------------

    def admit(self, limit: float, version: int = 0) -> Chunk | None:
        """Draw the next chunk, unless more than `limit` samples would be accepted. `version`: of
        the current weights.

        Raises DataError F80 if too many were dropped to draw again.
        """
        is_awaited = not self.running and not self.has(self.rule.batch)
        size = self.rule.size(int(limit) - self.accepted, is_awaited)
        if not size:
            return None
        if not self.rule.max_staleness and len(self._ended) > self.rule.max_redraws:
            raise self._too_few(int(limit) - self._past)
        chunk = Chunk(self._next_chunk, self.queue.take(size), self._before, version)
        self._next_chunk += 1
        self._in_progress[chunk.number] = chunk
        return chunk

    def redraw(self, chunk: Chunk, missing: Sequence[str], rows: int) -> list[Draw]:
        """Replace rows of a chunk that lie beyond the end of a stream of `rows` rows;
        returns the replacements."""
        self.queue.pass_ended(rows)
        return chunk.replace(missing, self.queue.instead_of)

    def end(
        self,
        chunk: Chunk,
        versions: Mapping[str, int],
        segments: Mapping[str, Mapping[str, Segments]] | None = None,
    ) -> list[str]:
        """A chunk has been through all calls; `versions` of the weights that generated it, and the
        `segments` of its responses, by call. Returns the samples that are no longer needed.

        Raises DataError F80 if more samples were dropped than training can wait for.
        """
        del self._in_progress[chunk.number]
        self._ended.append(chunk)
        self._ready += chunk.ready(versions, segments or {})
        if not self.rule.replaces:
            self._past += len(chunk.drops)
        dropped = sum(len(ended.drops) for ended in self._ended)
        if self.rule.max_staleness and dropped > (self.rule.max_redraws + 1) * self.rule.batch:
            raise self._too_many(dropped)
        return list(chunk.drops)

    # -- training ----------------------------------------------------------------------------------

    def waits_for(self, step: int) -> bool:
        """Whether a step must wait for samples in progress: more of them would be left than later
        steps can take before they are too stale. So those whose responses are long are neither
        lost nor sampled again."""
        if not self.rule.max_staleness or self.rule.takes_freshest:
            return False
        ready = Counter(sample.oldest for sample in self._ready)
        running = Counter[int]()
        for chunk in self._in_progress.values():
            running[chunk.version] += len(chunk.remaining)
        return any(self._leaves_too_many(step, version, ready, running) for version in running)

    def _leaves_too_many(
        self, step: int, version: int, ready: Counter[int], running: Counter[int]
    ) -> bool:
        """Whether a step that begins now leaves more samples up to a version than the steps after
        it may still take. `ready`, `running`: version → samples."""
        finished, unfinished = _up_to(version, ready), _up_to(version, running)
        left = finished + unfinished - min(finished, self.rule.batch)
        later_steps = max(0, version + self.rule.max_staleness - step)
        return left > later_steps * self.rule.batch

    def expire(self, step: int) -> list[str]:
        """Give back samples that are too stale for step number `step`; returns them."""
        limit = self.rule.max_staleness
        stale = [sample.draw for sample in self._ready if sample.staleness(step) > limit]
        self._ready = [sample for sample in self._ready if sample.staleness(step) <= limit]
        self.queue.give_back(stale)
        self.expired += len(stale)
        return [draw.id for draw in stale]

    def take(self, count: int) -> StepSamples:
        """The samples of the next step: `count` of those that are ready,
        or all if dropped ones are not replaced."""
        assert self.has(count) or not self.rule.replaces, (
            f"{count} samples needed, {len(self._ready)} ready"
        )
        sign = -1 if self.rule.takes_freshest else 1
        in_order = sorted(self._ready, key=lambda sample: (sign * sample.oldest, sample.chunk))
        batch, self._ready = in_order[:count], in_order[count:]
        self._past += len(batch)
        self.step += 1
        drawn = [draw for chunk in self._ended for draw in chunk.draws]
        surplus = self._put_surplus_back(drawn, batch)
        step = StepSamples(batch, self._ended, surplus)
        self._ended = []
        return step

    def abandon(self) -> list[str]:
        """Put back all that was drawn for the next step, as if it had not been; returns the samples
        that were ready."""
        self.queue.put_back([draw for chunk in self._ended for draw in chunk.draws])
        ready = [sample.id for sample in self._ready]
        self._ended, self._ready = [], []
        return ready

    def drain_drops(self) -> list[dict[str, Any]]:
        """Ledger entries: the samples dropped since the last call of this,
        or since a step took samples."""
        drops = unreported(self._ended)
        for chunk in self._ended:
            chunk.is_reported = True
        return [dropped_line(id_, drop) for id_, drop in drops.items()]

    def _put_surplus_back(self, drawn: Sequence[Draw], batch: Sequence[Ready]) -> list[str]:
        """At staleness 0 a step has drawn nothing beyond the last sample of its batch: the rest,
        dropped or not, goes back as if it had not been drawn, so that how many are drawn at a time
        changes nothing. Returns those of the rest that were ready."""
        if self.rule.max_staleness or not batch or not self.rule.replaces:
            return []
        beyond = drawn[drawn.index(batch[-1].draw) + 1 :]
        self.queue.put_back(beyond)
        for chunk in self._ended:
            for draw in beyond:
                chunk.drops.pop(draw.id, None)
        surplus, self._ready = [sample.id for sample in self._ready], []
        return surplus

    # -- errors ------------------------------------------------------------------------------------

    def _too_few(self, size: int) -> DataError:
        ready, times = len(self._ready), len(self._ended)
        drawn = sum(len(chunk.draws) for chunk in self._ended)
        few = (
            f"only {ready} of {drawn} drawn are left" if ready else f"none of {drawn} drawn is left"
        )
        draws = count(times, "draw")
        problem = f"step {self.step + 1}: a batch needs {size} samples, but {few} after {draws}"
        return self._shortage(problem, "train.max_redraws or train.prompts_per_draw")

    def _too_many(self, dropped: int) -> DataError:
        ready = f"a batch has {len(self._ready)} of its {self.rule.batch} samples"
        problem = f"{ready}, and {dropped} samples were dropped since the last step began"
        return self._shortage(problem, "train.max_redraws")

    def _shortage(self, problem: str, key: str) -> DataError:
        drops = Counter(drop for chunk in self._ended for drop in chunk.drops.values())
        names = list(self._before)
        in_order = sorted(drops.items(), key=lambda counted: names.index(counted[0].call))
        reasons = ", ".join(f"{drop.call} {count} ({drop.reason})" for drop, count in in_order)
        where = ", ".join(dict.fromkeys(f"graph.{drop.call}" for drop in drops))
        return DataError(
            f"{problem}; dropped: {reasons}",
            where=where,
            hint=f"raise {key}, or {WHY_SO_MANY}",
            code="F80",
        )


def _up_to(version: int, counts: Counter[int]) -> int:
    return sum(number for of_version, number in counts.items() if of_version <= version)
