"""A run that another process works on, as its files tell it: what was there before, and what comes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlcli.observe.metrics import with_nonfinite
from rlcli.observe.progress import Progress
from rlcli.observe.series import number


class Clock:
    """The time that a replay is at; once it has caught up, that of now."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self) -> float:
        return self.at if self.at is not None else time.time()


def records_of(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The records in lines of a metrics.jsonl, without those that cannot be read."""
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and number(record.get("step")) is not None:
            found.append(with_nonfinite(record))
    return found


def evaluation_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """The results of the evaluation after a step, if there was one."""
    return {key: value for key, value in record.items() if key.startswith("eval/")}


def replay(records: Sequence[Mapping[str, Any]], steps: int, until: float) -> Progress:
    """What a display would know after these records, of which the last was written at `until`."""
    clock = Clock()
    took = [sum(number(record.get(key)) or 0.0 for key in ("time/step", "time/eval")) for record in records]
    clock.at = until - sum(took)
    progress = Progress("step", steps, clock)
    for record, seconds in zip(records, took, strict=True):
        clock.at += seconds
        feed(progress, record)
    clock.at = None
    return progress


def feed(progress: Progress, record: Mapping[str, Any]) -> None:
    """One more record."""
    step = int(number(record.get("step")) or 0)
    if results := evaluation_in(record):
        progress.evaluation(step, results)
    if step:  # what is recorded of step 0 is an evaluation alone
        progress.step(record)
