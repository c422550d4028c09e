"""Which checkpoints stay: the newest, the best, and always the last one that is whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlcli.checkpoint.commit import LATEST, remove
from rlcli.checkpoint.disk import failures_told
from rlcli.checkpoint.verify import Report, checkpoints_in, examine, newest_verified


@dataclass(frozen=True)
class Best:
    """Keep the `count` checkpoints with the highest or lowest value of a metric."""

    metric: str
    which: Literal["highest", "lowest"]
    count: int


def prune(
    folder: Path, keep_last: int, keep_best: Best | None = None, *, committed: Path | None = None, dry_run: bool = False
) -> list[Path]:
    """Delete all checkpoints but those that stay; returns the deleted ones. Raises ResourceError.

    Judged by what is on the disk: damaged checkpoints count for nothing. Whatever the numbers say, the one that LATEST
    names and the newest whole one stay, and where none is whole nothing is deleted. `committed`: the checkpoint that
    the run has just written, known to be whole; any that is newer was passed over when the run was resumed, and goes.
    """
    with failures_told(folder):
        candidates = checkpoints_in(folder)
    last = committed or _newest_whole(folder)
    if last is None:
        return []
    reports = [examine(path, read=False) for path in candidates if committed is None or path.name <= committed.name]
    whole = [report for report in reports if not report.faults]
    stay = {report.path.name for report in (*whole[:keep_last], *best_of(whole, keep_best))}
    stay |= {last.name, latest_name(folder)}
    doomed = [path for path in candidates if path.name not in stay]
    for path in reversed(doomed) if not dry_run else ():
        remove(path)
    return doomed


def best_of(reports: Sequence[Report], best: Best | None) -> list[Report]:
    """Those with the best value, the best first; of equal ones the newer."""
    if best is None:
        return []
    sign = 1 if best.which == "highest" else -1
    scored = [
        (sign * report.manifest.metrics[best.metric], report.path.name, report)
        for report in reports
        if report.manifest is not None and best.metric in report.manifest.metrics
    ]
    return [report for *_, report in sorted(scored, key=lambda one: one[:2], reverse=True)[: best.count]]


def latest_name(folder: Path) -> str:
    """The folder that LATEST names; empty if it names none."""
    try:
        return str(json.loads((folder / LATEST).read_bytes())["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _newest_whole(folder: Path) -> Path | None:
    checkpoint, _ = newest_verified(folder)
    return checkpoint.path if checkpoint else None
