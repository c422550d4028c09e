"""Which checkpoints are kept: the newest, the best, and always the last one that is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlcli.checkpoint.commit import LATEST, is_leftover, remove
from rlcli.checkpoint.manifest import read_manifest
from rlcli.checkpoint.verify import (
    NAME,
    CheckpointReport,
    belongs,
    checkpoints_in,
    examine,
    newest_verified,
)
from rlcli.disk_errors import explain_disk_errors
from rlcli.files import known_object


@dataclass(frozen=True)
class Best:
    """Keep the `count` checkpoints with the highest or lowest value of a metric."""

    metric: str
    which: Literal["highest", "lowest"]
    count: int


def prune(
    folder: Path,
    keep_last: int,
    keep_best: Best | None = None,
    *,
    run_id: str | None = None,
    committed: Path | None = None,
    dry_run: bool = False,
) -> list[Path]:
    """Delete all checkpoints of a run except those to keep; returns the deleted ones.
    Raises ResourceError.

    Judged by what is on disk: damaged checkpoints do not count. Whatever the numbers, the one that
    LATEST names and the newest whole one are kept, and if none is whole nothing is deleted. Nor is
    anything whose manifest does not say that it belongs to the run: `run_id`, or that of the newest
    whole one. `committed`: the checkpoint that the run has just written, known to be whole; any
    newer one was passed over when the run was resumed, and is deleted.
    """
    last = committed or _newest_whole(folder, run_id)
    if last is None:
        return []
    owner = run_id or read_manifest(last).run_id
    candidates = [path for path in checkpoints_in(folder) if belongs(path, owner)]
    reports = [
        examine(path, read=False)
        for path in candidates
        if committed is None or path.name <= committed.name
    ]
    undamaged = [report for report in reports if not report.faults]
    stay = {report.path.name for report in (*undamaged[:keep_last], *best_of(undamaged, keep_best))}
    stay |= {last.name, latest_name(folder)}
    doomed = [path for path in candidates if path.name not in stay]
    if not dry_run:
        for path in reversed(doomed):
            remove(path, owner)
    return doomed


def strangers(folder: Path, run_id: str) -> list[Path]:
    """Contents of a run's checkpoint folder that may not be its own; these are never deleted.
    Raises ResourceError."""
    with explain_disk_errors(folder):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        path
        for path in entries
        if path.name != LATEST
        and not is_leftover(path, run_id)
        and not (NAME.fullmatch(path.name) and belongs(path, run_id))
    ]


def best_of(reports: Sequence[CheckpointReport], best: Best | None) -> list[CheckpointReport]:
    """The reports with the best values, best first; the newer first among equal ones."""
    if best is None:
        return []
    sign = 1 if best.which == "highest" else -1
    scored = [
        (sign * report.manifest.metrics[best.metric], report.path.name, report)
        for report in reports
        if report.manifest is not None and best.metric in report.manifest.metrics
    ]
    return [
        report
        for *_, report in sorted(scored, key=lambda entry: entry[:2], reverse=True)[: best.count]
    ]


def latest_name(folder: Path) -> str:
    """The folder that LATEST names; empty if it names none."""
    return str(known_object(folder / LATEST).get("checkpoint", ""))


def latest_step(folder: Path) -> int | None:
    """The step of the checkpoint that LATEST names, whether or not it exists;
    None if it names none."""
    step = known_object(folder / LATEST).get("step")
    return step if type(step) is int and step >= 0 else None


def _newest_whole(folder: Path, run_id: str | None) -> Path | None:
    checkpoint, _ = newest_verified(folder, run_id)
    return checkpoint.path if checkpoint else None
