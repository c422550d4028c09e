"""What a tracker implements, and what it receives of a run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlcli.observe.samples import SampleRecord


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker shows about a run in addition to its numbers. Secrets are redacted."""

    folder: Path
    id: str
    """32 hexadecimal digits."""
    name: str
    """`<recipe>/<folder>`."""
    project: str
    """Runs that are looked at together: `log.project`, or the recipe's name."""
    group: str
    """The same for runs that differ only in their seed."""
    tags: tuple[str, ...]
    settings: Mapping[str, Any]
    """The resolved recipe: key → value, `train.steps` → 40."""
    origins: Mapping[str, str]
    """Key → where its value was written."""


@dataclass
class Update:
    """What a run has written about a step since the last time."""

    step: int
    """0 is before training."""
    numbers: dict[str, float] = field(default_factory=dict)
    """As in metrics.jsonl; also nan and infinite ones."""
    samples: list[SampleRecord] = field(default_factory=list)

    def samples_by_phase(self) -> dict[str, list[SampleRecord]]:
        """Phase, train or eval → its samples."""
        phases: dict[str, list[SampleRecord]] = {}
        for sample in self.samples:
            phases.setdefault(sample.phase, []).append(sample)
        return phases


SAMPLE_COLUMNS = ("step", "id", "number", "prompt", "response", "reward", "length", "reason")
"""Columns of a table of samples: fields of `SampleRecord`."""


def sample_row(sample: SampleRecord) -> tuple[Any, ...]:
    """A sample's values of SAMPLE_COLUMNS."""
    return tuple(
        str(sample.id) if column == "id" else getattr(sample, column) for column in SAMPLE_COLUMNS
    )


class Tracker(Protocol):
    """Writes a run to one tool's store. Its methods may raise anything and take any time; nothing
    but this mirror depends on them."""

    def continues(self, run: TrackedRun, entry: str) -> bool:
        """Whether `open` can add to an entry that an earlier process has closed, and the tool's own
        settings, such as its environment variables, still lead there. Otherwise all is written
        anew."""

    def open(self, run: TrackedRun, entry: str | None) -> str:
        """Open the run's entry in the store, to add to it: the one that an earlier process has
        closed, or (None) a new one. Returns what finds it again."""

    def discard(self, run: TrackedRun, entry: str) -> None:
        """The steps in this entry have been repeated, or it is unknown which of them are there: a
        new entry will hold all of them. Remove it, or mark it as replaced."""

    def write(self, updates: Sequence[Update]) -> None:
        """Add what the run has written; steps do not decrease, from call to call, except for
        samples that come late. The numbers of a step come together, its samples also in calls
        before and after that."""

    def close(self, state: str, curve: Path | None) -> None:
        """Finish what was begun: everything is stored when this returns. `state`: of status.json;
        `curve`: the picture of the learning curve, if there is one."""


CLASSES = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
}
"""Tracker → its class, in `<tracker>_tracker.py`."""


def make_tracker(name: str) -> Tracker:
    """The tracker of that name; its library must be installed. Raises ImportError."""
    module = importlib.import_module(f"rlcli.observe.trackers.{name}_tracker")
    tracker: Tracker = getattr(module, CLASSES[name])()
    return tracker
