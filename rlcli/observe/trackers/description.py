"""What trackers show about a run: its name, its group, its recipe."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcli.api.run_folder import SWEEP
from rlcli.errors import ResourceError
from rlcli.files import known_object
from rlcli.observe.group_comparison import identity_of
from rlcli.observe.run_comparison import recorded_recipe
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.trackers.contract import TrackedRun
from rlcli.observe.trackers.redaction import Redactor

RUN_ID = re.compile("[0-9a-f]{32}")


def describe_run(folder: Path, redactor: Redactor) -> TrackedRun:
    """Raises ResourceError F72 if the folder is not that of a run that has begun, RecipeError if
    its recipe cannot be read."""
    run = RunDirectory.open(folder)
    if not RUN_ID.fullmatch(run.run_id):
        raise ResourceError(
            f"{run.run_id[:80]!r} is not the id of a run", where=str(run.status), code="F72"
        )
    recipe = recorded_recipe(run.path)
    name, project = _names_of(recipe, run)
    sweep = _sweep_of(run.path)
    return TrackedRun(
        folder=run.path,
        id=run.run_id,
        name="/".join([name, *sweep, run.path.name]),
        project=project,
        group=f"{name}-{_group_of(run)}",
        tags=tuple(f"sweep:{name}" for name in sweep),
        settings=redactor.value(dict(_leaves(recipe))),
        origins=redactor.value(known_object(run.origins)),
    )


def _names_of(recipe: dict[str, Any], run: RunDirectory) -> tuple[str, str]:
    """The recipe's name, and that of its project. Raises ResourceError F72."""
    name, log = recipe.get("name"), recipe.get("log")
    if not (isinstance(name, str) and isinstance(log, dict)):
        raise ResourceError("it has no recipe", where=str(run.resolved_recipe), code="F72")
    return name, str(log.get("project") or name)


def _sweep_of(run: Path) -> list[str]:
    """The name of the folder of the sweep that a run belongs to, if it does."""
    return [run.parent.name] if (run.parent / SWEEP).is_file() else []


def _group_of(run: RunDirectory) -> str:
    """The same for runs that differ only in their seed."""
    return hashlib.sha256(identity_of(run).encode()).hexdigest()[:8]


def _leaves(section: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(`train.steps`, 40) for every value that is not a section."""
    for key, value in section.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
