"""Folders of runs for trackers, a tracker that keeps what it gets in memory, and a reader of
TensorBoard's files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlcli.observe.metrics import MetricsWriter
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.samples import SampleRecord, SampleWriter
from rlcli.observe.trackers.contract import TrackedRun, Update

RECIPE = """\
name: toy
seed: 1
train: {steps: 4}
judge: {url: "http://user:hunter22@judge/", api_key: hunter22}
log: {project: null}
"""


def make_run(folder: Path, steps: Iterable[int] = (), recipe: str = RECIPE) -> RunDirectory:
    """The folder of a run that has done some steps and has ended."""
    with RunDirectory.create(folder, "toy") as run:
        run.write_text(run.resolved_recipe.name, recipe)
        run.write_text("origins.json", json.dumps({"train.steps": "toy.yaml:3:16"}))
        run.write_status("done", max(steps, default=0), 4, 0)
    add_steps(run.path, steps)
    return run


def add_steps(folder: Path, steps: Iterable[int], attempt: int = 0) -> None:
    """Write steps of a run; those of another attempt have other numbers."""
    with (
        MetricsWriter(folder / "metrics.jsonl") as metrics,
        SampleWriter(folder / "samples.jsonl") as samples,
    ):
        for step in steps:
            numbers = {
                "actor/loss": step / 8,
                "actor/odd": float("nan"),
                "time/step": attempt + 0.5,
            }
            metrics.write(step, numbers | {"actor/limit": float("-inf"), "note": "text"})
            text = f"attempt {attempt}"
            samples.write(SampleRecord(step=step, id=step, prompt="1+1?", response=text, reward=1))


class MemoryTracker:
    """Keeps entries apart, as any store does; several mirrors may use one, after each other."""

    def __init__(self) -> None:
        self.entries: dict[str, list[Update]] = {}
        self.discarded: list[str] = []
        self.run: TrackedRun | None = None
        self.state: str | None = None
        self._entry = ""

    def continues(self, run: TrackedRun, entry: str) -> bool:
        return entry in self.entries

    def open(self, run: TrackedRun, entry: str | None) -> str:
        self.run, self._entry = run, entry or f"entry {len(self.discarded)}"
        self.entries.setdefault(self._entry, [])
        return self._entry

    def discard(self, run: TrackedRun, entry: str) -> None:
        self.discarded.append(entry)
        self.entries.pop(entry, None)

    def write(self, updates: Sequence[Update]) -> None:
        self.entries[self._entry] += updates

    def close(self, state: str, curve: Path | None) -> None:
        self.state = state

    @property
    def updates(self) -> list[Update]:
        """What the only entry has."""
        (updates,) = self.entries.values()
        return updates


def numbers_of(records: Iterable[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """(step, key) → number, of the records of a run."""
    return {
        (record["step"], key): float(value)
        for record in records
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float)
    }


def tensorboard_events(folder: Path) -> Iterator[Any]:
    """The events of all event files of a folder, in order."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def tensorboard_scalars(folder: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) of every scalar in them."""
    return [
        (event.step, value.tag, value.simple_value)
        for event in tensorboard_events(folder)
        for value in event.summary.value
        if value.WhichOneof("value") == "simple_value"
    ]
