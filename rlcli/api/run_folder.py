"""The files that identify a run's folder: one list for the code that writes it and the code that
looks for it."""

from __future__ import annotations

from pathlib import Path

STATUS = "status.json"
RESOLVED_RECIPE = "recipe.resolved.yaml"
COMMITTED = "committed.json"
CHECKPOINTS = "checkpoints"
LOCK = "lock"
LOGS = "logs"
PROCESSES = "procs.json"

MARKS = (STATUS, RESOLVED_RECIPE, COMMITTED)
"""Any of them shows that a folder is that of a run."""


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).is_file() for name in MARKS)
