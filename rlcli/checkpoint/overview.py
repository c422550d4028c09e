"""A run's checkpoints for people: where they are, how old and how large they are,
which are marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcli.api.run_folder import CHECKPOINTS, is_run
from rlcli.checkpoint.commit import DELETING, TEMPORARY
from rlcli.checkpoint.manifest import MANIFEST
from rlcli.checkpoint.retention import Best, best_of, latest_name
from rlcli.checkpoint.verify import NAME, CheckpointReport, checkpoints_in, examine, step_of
from rlcli.errors import ModelError, UsageError


@dataclass(frozen=True)
class CheckpointLocation:
    """The run, folder of checkpoints, or single checkpoint that a user named."""

    folder: Path
    """Folder of the checkpoints."""
    run: Path | None
    """The run that they belong to, if it exists."""
    only: Path | None = None
    """The one checkpoint that was named."""

    def select(self, steps: Sequence[int] = ()) -> list[Path]:
        """The selected checkpoints, newest first. Raises UsageError,
        or ModelError if there is none."""
        checkpoints = [self.only] if self.only is not None else checkpoints_in(self.folder)
        if not checkpoints:
            raise ModelError("there is no checkpoint", where=str(self.folder))
        missing = sorted(set(steps) - {step_of(path) for path in checkpoints})
        if missing:
            steps_there = ", ".join(str(step_of(path)) for path in checkpoints)
            raise UsageError(
                f"{self.folder} has no checkpoint of step {missing[0]}",
                hint=f"there are: {steps_there}",
            )
        return [path for path in checkpoints if not steps or step_of(path) in steps]


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint."""

    report: CheckpointReport
    written: float | None
    """When, in seconds since 1970."""
    is_latest: bool
    is_best: bool


def find_checkpoints(path: Path) -> CheckpointLocation:
    """What a path refers to. Raises UsageError."""
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}")
    if (path / MANIFEST).is_file() or NAME.fullmatch(path.name):
        return CheckpointLocation(path.parent, _run_of(path.parent), path)
    if (path / CHECKPOINTS).is_dir() or is_run(path):
        return CheckpointLocation(path / CHECKPOINTS, path)
    if path.name == CHECKPOINTS or checkpoints_in(path):
        return CheckpointLocation(path, _run_of(path))
    raise UsageError(
        f"{path} is neither a run nor a folder of checkpoints", hint=f"a run has {CHECKPOINTS}/"
    )


def overview(location: CheckpointLocation, best: Best | None) -> list[CheckpointEntry]:
    """All checkpoints, newest first, judged by their manifests and the sizes of their files."""
    checkpoints = [location.only] if location.only is not None else checkpoints_in(location.folder)
    reports = [examine(path, read=False) for path in checkpoints]
    marked = {
        report.path for report in best_of([report for report in reports if not report.faults], best)
    }
    latest = latest_name(location.folder)
    return [
        CheckpointEntry(
            report, _written(report.path), report.path.name == latest, report.path in marked
        )
        for report in reports
    ]


def leftovers(location: CheckpointLocation) -> Iterator[Path]:
    """Folders that are being written or deleted, or were when their process died."""
    for path in sorted(location.folder.iterdir()) if location.folder.is_dir() else ():
        if path.name.startswith((TEMPORARY, DELETING)):
            yield path


def _run_of(checkpoints: Path) -> Path | None:
    run = checkpoints.absolute().parent
    return run if is_run(run) else None


def _written(checkpoint: Path) -> float | None:
    for file in (checkpoint / MANIFEST, checkpoint):
        try:
            return file.lstat().st_mtime
        except OSError:
            continue
    return None
