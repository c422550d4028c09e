"""The files that identify a run's folder: one list for the code that writes it and the code that
looks for it."""

from __future__ import annotations

from pathlib import Path

STATUS = "status.json"
RESOLVED_RECIPE = "recipe.resolved.yaml"
ENVIRONMENT = "environment.json"
COMMITTED = "committed.json"
CHECKPOINTS = "checkpoints"
LOCK = "lock"
LOGS = "logs"
PROCESSES = "procs.json"
SWEEP = "sweep.json"
"""In the folder of a sweep, whose folders are runs."""

MARKS = (STATUS, RESOLVED_RECIPE, COMMITTED)
"""Any of them shows that a folder is that of a run."""


def newest_run_in(folder: Path) -> Path | None:
    """The newest run in a folder of runs, or in the folders in it, such as those of recipes."""
    runs = [path for path in (*folder.glob("*"), *folder.glob("*/*")) if is_run(path)]
    return max(runs, key=lambda run: run.name, default=None)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).is_file() for name in MARKS)
