"""What trackers show about a run: its name, its group, its recipe."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlcli.api.run_folder import SWEEP
from rlcli.errors import ResourceError
from rlcli.files import known_object, read_text
from rlcli.observe.group_comparison import identity_of
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.trackers.contract import TrackedRun
from rlcli.observe.trackers.redaction import Redactor

RUN_ID = re.compile("[0-9a-f]{32}")


def describe_run(folder: Path, redactor: Redactor) -> TrackedRun:
    """Raises ResourceError F72 if the folder is not that of a run that has begun."""
    run = RunDirectory.open(folder)
    if not RUN_ID.fullmatch(run.run_id):
        raise ResourceError(
            f"{run.run_id[:80]!r} is not the id of a run", where=str(run.status), code="F72"
        )
    recipe = yaml.safe_load(read_text(run.resolved_recipe))
    sweep = _sweep_of(run.path)
    return TrackedRun(
        folder=run.path,
        id=run.run_id,
        name="/".join([recipe["name"], *sweep, run.path.name]),
        project=recipe["log"].get("project") or recipe["name"],
        group=f"{recipe['name']}-{_group_of(run)}",
        tags=tuple(f"sweep:{name}" for name in sweep),
        settings=redactor.value(dict(_leaves(recipe))),
        origins=redactor.value(known_object(run.origins)),
    )


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
