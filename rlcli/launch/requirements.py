"""What rlcli needs and can use, as its own metadata say it, and what of it is installed. Imports none of it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.project import PACKAGE, is_project

if TYPE_CHECKING:
    from packaging.requirements import Requirement

FOR_DEVELOPERS = ("test",)
"""Extras that nobody needs to train."""


@dataclass(frozen=True)
class Requirements:
    """The dependencies of rlcli and of each of its extras."""

    python: str
    """The versions of Python, such as `>=3.11`."""
    needed: tuple[Requirement, ...]
    extras: dict[str, tuple[Requirement, ...]]


def read_requirements() -> Requirements:
    """From the checkout's pyproject.toml, or else from the metadata of the installed package."""
    from packaging.requirements import Requirement

    if is_project(PACKAGE.parent):
        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        needed = tuple(map(Requirement, project["dependencies"]))
        extras = {name: tuple(map(Requirement, of)) for name, of in project["optional-dependencies"].items()}
        return Requirements(project["requires-python"], needed, _useful(extras))
    told = metadata.metadata("rlcli")
    every = [Requirement(line) for line in told.get_all("Requires-Dist") or []]
    named = {name: _of_extra(every, name) for name in told.get_all("Provides-Extra") or []}
    needed = tuple(one for one in every if one.marker is None or one.marker.evaluate({"extra": ""}))
    return Requirements(told["Requires-Python"], needed, _useful(named))


def _of_extra(every: list[Requirement], extra: str) -> tuple[Requirement, ...]:
    marked = (one for one in every if one.marker is not None and not one.marker.evaluate({"extra": ""}))
    return tuple(one for one in marked if one.marker is not None and one.marker.evaluate({"extra": extra}))


def _useful(extras: dict[str, tuple[Requirement, ...]]) -> dict[str, tuple[Requirement, ...]]:
    return {name: of for name, of in extras.items() if name not in FOR_DEVELOPERS}


def fits(requirement: Requirement, version: str) -> bool:
    """Whether a version is among those that are asked for; a local part such as `+cpu` does not matter."""
    return requirement.specifier.contains(version, prereleases=True)


def torch_build() -> str | None:
    """`cpu`, `cuda 13.0`, `rocm 6.4`, by torch's own version file; None if it cannot be told."""
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    builds = {name: re.search(rf"^{name}\b[^=\n]*= *'([^']+)'", text, re.MULTILINE) for name in ("cuda", "hip")}
    if builds["cuda"]:
        return f"cuda {builds['cuda'][1]}"
    return f"rocm {builds['hip'][1]}" if builds["hip"] else "cpu"
