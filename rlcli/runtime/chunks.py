"""Samples that are drawn together, those that are ready, and those that a step takes, with what the
ledger says of each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlcli.api.output_checks import Segments
from rlcli.errors import UsageError
from rlcli.runtime.draws import Draw


@dataclass(frozen=True)
class Drop:
    """The reason why a sample is not trained on."""

    call: str
    reason: str


@dataclass(frozen=True)
class Ready:
    """A sample that a training step may take."""

    draw: Draw
    versions: Mapping[str, int]
    """Generating call → training steps behind the oldest weights that it sampled with.
    Only for weights that change."""
    chunk: int = -1
    """The chunk it was drawn with; -1 if it was drawn before the run was resumed."""
    segments: Segments = field(default_factory=list)
    """The segments of each of its responses, if weights may change while they are sampled."""

    @property
    def id(self) -> str:
        return self.draw.id

    @property
    def oldest(self) -> int:
        """The version of its oldest part."""
        return min(self.versions.values(), default=0)

    def as_json(self) -> dict[str, Any]:
        """The sample's entry in a checkpoint."""
        return {
            "draw": list(self.draw),
            "versions": dict(self.versions),
            "segments": self.segments,
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Ready:
        segments = fields.get("segments", [])
        return Ready(Draw(*fields["draw"]), fields["versions"], segments=segments)

    def as_ledger(self) -> dict[str, Any]:
        """What the ledger says about its weights; segments are listed only if a response has
        several."""
        line: dict[str, Any] = {"versions": dict(self.versions)}
        if any(len(response) > 1 for response in self.segments):
            line["segments"] = self.segments
        return line

    def staleness(self, step: int) -> int:
        """Training steps between the weights that generated it and those that step number `step`
        (from 0) trains."""
        return step - self.oldest if self.versions else 0


class Chunk:
    """Samples that are drawn together and go through the calls before training."""

    def __init__(
        self, number: int, draws: list[Draw], before: Mapping[str, set[str]], version: int = 0
    ):
        """`before`: call → the calls that it waits for, in the order of the graph; `version`: of
        the weights at the time when it was drawn."""
        self.number = number
        self.version = version
        self.draws = draws
        self.drops: dict[str, Drop] = {}
        """Sample → why it was dropped."""
        self.is_reported = False
        """Whether the ledger has its drops."""
        self._before = before

    @property
    def remaining(self) -> list[Draw]:
        """Samples that no call has dropped."""
        return [draw for draw in self.draws if draw.id not in self.drops]

    def ids(self, call: str) -> list[str]:
        """The samples that a call works on: those that the calls before it have kept. Which of the
        other calls are done makes no difference."""
        dropped = {id_ for id_, drop in self.drops.items() if drop.call in self._before[call]}
        return [draw.id for draw in self.draws if draw.id not in dropped]

    def drop(self, call: str, reasons: Mapping[str, str]) -> None:
        """Count samples as dropped by a call. If several calls drop a sample,
        the first in the graph counts."""
        in_order = list(self._before)
        for id_, reason in reasons.items():
            drops = [self.drops.get(id_, Drop(call, reason)), Drop(call, reason)]
            self.drops[id_] = min(drops, key=lambda drop: in_order.index(drop.call))

    def ready(
        self, versions: Mapping[str, int], segments: Mapping[str, Mapping[str, Segments]]
    ) -> Iterator[Ready]:
        """Its samples that no call has dropped; `versions` and `segments` of each generating
        call, the latter by sample."""
        for draw in self.remaining:
            of_calls = {
                call: of_samples[draw.id]
                for call, of_samples in segments.items()
                if draw.id in of_samples
            }
            oldest = {call: _oldest(responses) for call, responses in of_calls.items()}
            of_sample = [response for responses in of_calls.values() for response in responses]
            yield Ready(draw, {**versions, **oldest}, self.number, of_sample)

    def replace(self, missing: Sequence[str], instead_of: Callable[[Draw], Draw]) -> list[Draw]:
        """Draw others instead of rows that do not exist; returns these."""
        replacements = {draw.id: instead_of(draw) for draw in self.draws if draw.id in missing}
        self.draws = [replacements.get(draw.id, draw) for draw in self.draws]
        return list(replacements.values())


@dataclass
class StepSamples:
    """The samples that a training step takes, and those dropped since the step before took its
    own."""

    batch: list[Ready]
    chunks: list[Chunk] = field(default_factory=list)
    """Chunks that have ended since the step before, in order."""
    surplus: list[str] = field(default_factory=list)
    """Samples that went back to the queue."""

    @property
    def drawn(self) -> list[Draw]:
        """What was drawn, in order."""
        return [draw for chunk in self.chunks for draw in chunk.draws]

    @property
    def drops(self) -> dict[str, Drop]:
        """Sample → why it was dropped, if the ledger does not have it yet."""
        return unreported(self.chunks)

    @property
    def dropped(self) -> Counter[str]:
        """Reason → how many samples were dropped, whether or not the ledger has them already."""
        return Counter(drop.reason for chunk in self.chunks for drop in chunk.drops.values())

    @property
    def all_ids(self) -> list[str]:
        """The samples of the batch, in its order."""
        return [sample.id for sample in self.batch]

    def ids(self, call: str) -> list[str]:
        """The samples that a call works on: all of them."""
        return self.all_ids

    def drop(self, call: str, reasons: Mapping[str, str]) -> None:
        """Raises UsageError R71 if there are any: training has begun."""
        if reasons:
            problem = f"{call} drops samples of a batch that is complete"
            raise UsageError(
                problem, hint="drop samples in a call that comes before training", code="R71"
            )

    def counts(self, reasons: Iterable[str]) -> dict[str, float]:
        """Counts for the metrics: samples that were drawn, dropped (for each of `reasons`), drawn
        as replacements, and given back."""
        drawn, dropped = len(self.drawn), Counter(drop.reason for drop in self.drops.values())
        drawn_first = len(self.chunks[0].draws) if self.chunks else 0
        counts = {
            "drawn": drawn,
            "dropped": dropped.total(),
            "redrawn": drawn - drawn_first,
            "returned": len(self.surplus),
            **{f"dropped/{reason}": dropped[reason] for reason in reasons},
        }
        return {f"samples/{name}": float(count) for name, count in counts.items()}

    def ledger(self, state: str, versions: Mapping[str, int]) -> Iterator[dict[str, Any]]:
        """One line for each finished sample: why it was dropped, or `state` and the versions of the
        weights that generated it, those of the step's own calls being `versions`."""
        taken, drops = {sample.id: sample for sample in self.batch}, self.drops
        for id_ in dict.fromkeys([*(draw.id for draw in self.drawn), *taken]):
            if id_ in taken:
                line = {"sample": id_, "state": state, **taken[id_].as_ledger()}
                yield line | {"versions": {**line["versions"], **versions}}
            elif id_ in drops:
                yield dropped_line(id_, drops[id_])


def _oldest(responses: Segments) -> int:
    """The version of the oldest segment of a sample's responses."""
    return min(version for response in responses for version, _ in response)


def unreported(chunks: Iterable[Chunk]) -> dict[str, Drop]:
    """Sample → why it was dropped, if the ledger does not have it yet."""
    drops = (chunk.drops for chunk in chunks if not chunk.is_reported)
    return {id_: drop for of_chunk in drops for id_, drop in of_chunk.items()}


def dropped_line(id_: str, drop: Drop) -> dict[str, Any]:
    """The ledger's entry of a dropped sample."""
    return {"sample": id_, "state": "dropped", **asdict(drop)}
