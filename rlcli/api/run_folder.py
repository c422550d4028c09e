"""The files by which the folder of a run is known: one list for those who write it and those who look for it."""

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
"""Each of them shows that a folder is that of a run."""


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).is_file() for name in MARKS)
