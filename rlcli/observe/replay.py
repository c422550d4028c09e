"""Shows a run of another process from its files: its history, then its progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import ResourceError
from rlcli.observe.display import Display
from rlcli.observe.metrics import records_of
from rlcli.observe.progress import Progress
from rlcli.observe.run_overview import Overview, read_overview
from rlcli.observe.series import number, seconds_of
from rlcli.observe.tail import Tail

LOOK_SECONDS = 0.5

Look = Callable[[Path], Overview | None]


class Clock:
    """The current time of a replay; once it has caught up, the real time, which continues evenly
    when somebody sets the machine's clock."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._zero = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self.at if self.at is not None else self._zero + time.monotonic()


def evaluation_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """The results of the evaluation after a step, if there was one."""
    return {key: value for key, value in record.items() if key.startswith("eval/")}


def replay(records: Sequence[Mapping[str, Any]], steps: int, until: float) -> Progress:
    """The progress that a display would have after these records,
    the last of which was written at `until`."""
    clock = Clock()
    took = [seconds_of(record) for record in records]
    clock.at = until - sum(took)
    progress = Progress("step", steps, clock)
    for record, seconds in zip(records, took, strict=True):
        clock.at += seconds
        feed(progress, record)
    clock.at = None
    return progress


def progress_of(run: Overview, records: Sequence[Mapping[str, Any]]) -> Progress:
    """The progress of a run after these records, its last."""
    return replay(records, run.steps or 0, run.updated or time.time())


def progress_so_far(metrics: Path, steps: int, until: int | None = None) -> Progress:
    """The progress of a run that is resumed after what its metrics.jsonl has, or after the step
    `until`."""
    records = records_of(Tail(metrics).lines()[0])
    last = math.inf if until is None else until
    progress = replay([each for each in records if each["step"] <= last], steps, time.time())
    progress.resume()
    return progress


class FollowedRun:
    """A run from its files alone, as it was when they were last looked at."""

    def __init__(self, folder: Path, look: Look = read_overview):
        """`look` returns the state of the run."""
        self.folder = folder
        self._look = look
        self._tail = Tail(folder / "metrics.jsonl")
        self.overview: Overview | None = None
        """None: its folder is gone."""

    def refresh(self) -> tuple[list[dict[str, Any]], bool]:
        """Look again. Returns new records, and whether those before are void: the run was resumed
        and repeats steps."""
        # read before its metrics: a run that is over has written all of them
        self.overview = self._look(self.folder)
        lines, is_new = self._tail.lines()
        return records_of(lines), is_new

    def present(self) -> Overview:
        """Its state. Raises ResourceError F72 if its folder is gone."""
        if self.overview is None:
            raise ResourceError(f"{self.folder} is not the folder of a run any more", code="F72")
        return self.overview


def follow(files: FollowedRun, display: Display, name: str) -> Overview:
    """Show a run until it is over. Returns its final state. Raises ResourceError F72."""
    records, _ = files.refresh()
    run = files.present()
    progress = progress_of(run, records)
    display.start(name, files.folder, progress.steps)
    display.take_up(progress)
    while True:
        records, is_new = files.refresh()
        run = files.present()
        if is_new:
            progress, records = progress_of(run, records), []
            display.take_up(progress)
        progress.steps = run.steps or 0
        for record in records:
            if results := evaluation_in(record):
                display.evaluation(int(record["step"]), results)
            if record["step"]:
                display.step(record)
        if not run.is_under_way:
            progress.end(run.updated or time.time())
            return run
        display.phase(f"{run.state}, last update {run.age or 0:.0f} s ago")
        time.sleep(LOOK_SECONDS)


def feed(progress: Progress, record: Mapping[str, Any]) -> None:
    """Feed one more record."""
    step = int(number(record.get("step")) or 0)
    if results := evaluation_in(record):
        progress.evaluation(step, results)
    if step:  # the record of step 0 is only an evaluation
        progress.step(record)
