"""Shows a run of another process from its files: its history, then its progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import ResourceError
from rlcli.observe.display import Display
from rlcli.observe.metrics import with_nonfinite
from rlcli.observe.progress import Progress
from rlcli.observe.run_overview import Overview, read_overview
from rlcli.observe.series import number
from rlcli.observe.tail import Tail

LOOK_SECONDS = 0.5


class Clock:
    """The current time of a replay; once it has caught up, the real time."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self) -> float:
        return self.at if self.at is not None else time.time()


def records_of(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The records in lines of a metrics.jsonl, skipping those that cannot be read."""
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and number(record.get("step")) is not None:
            records.append(with_nonfinite(record))
    return records


def evaluation_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """The results of the evaluation after a step, if there was one."""
    return {key: value for key, value in record.items() if key.startswith("eval/")}


def replay(records: Sequence[Mapping[str, Any]], steps: int, until: float) -> Progress:
    """The progress that a display would have after these records,
    the last of which was written at `until`."""
    clock = Clock()
    took = [
        sum(number(record.get(key)) or 0.0 for key in ("time/step", "time/eval"))
        for record in records
    ]
    clock.at = until - sum(took)
    progress = Progress("step", steps, clock)
    for record, seconds in zip(records, took, strict=True):
        clock.at += seconds
        feed(progress, record)
    clock.at = None
    return progress


def follow(
    folder: Path,
    display: Display,
    name: str,
    look: Callable[[Path], Overview | None] = read_overview,
) -> Overview:
    """Show a run until it is over, from its files alone; `look` returns its state. Returns the
    final state. Raises ResourceError F72."""
    tail = Tail(folder / "metrics.jsonl")
    run = _known(look(folder), folder)
    records = records_of(tail.lines()[0])
    progress = replay(records, run.steps or 0, run.updated or time.time())
    display.start(name, folder, progress.steps)
    display.take_up(progress)
    while True:
        # read before its metrics: a run that is over has written all of them
        run = _known(look(folder), folder)
        lines, is_new = tail.lines()
        if is_new:  # it was resumed and repeats steps
            progress = replay(records_of(lines), run.steps or 0, run.updated or time.time())
            display.take_up(progress)
            lines = []
        progress.steps = run.steps or 0
        for record in records_of(lines):
            if results := evaluation_in(record):
                display.evaluation(int(record["step"]), results)
            if record["step"]:
                display.step(record)
        if not run.is_under_way:
            progress.end(run.updated or time.time())
            return run
        display.phase(f"{run.state}, last update {run.age or 0:.0f} s ago")
        time.sleep(LOOK_SECONDS)


def _known(run: Overview | None, folder: Path) -> Overview:
    if run is None:
        raise ResourceError(f"{folder} is not the folder of a run any more", code="F72")
    return run


def feed(progress: Progress, record: Mapping[str, Any]) -> None:
    """Feed one more record."""
    step = int(number(record.get("step")) or 0)
    if results := evaluation_in(record):
        progress.evaluation(step, results)
    if step:  # the record of step 0 is only an evaluation
        progress.step(record)
