"""Requirements of rlcli and its components, as declared, and which of them are installed.
Imports none of them.

A component names the distributions that it needs in addition to rlcli's, by their pip names:

    REQUIRES: ClassVar[tuple[str, ...]] = ("deepspeed",)

A requirement may include a version, such as `vllm>=0.11`. What only its servers need, in an
environment of their own, is in `SERVER_REQUIRES`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlcli.errors import ProjectError, ResourceError
from rlcli.project import PACKAGE, is_project

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from rlcli.registry.signature import Signature

FOR_DEVELOPERS = ("test",)
"""Extras not needed for training."""

BUILT_WITH_TORCH = {"flash-attn": ("ninja", "packaging", "psutil", "setuptools", "wheel")}
"""Distributions that are compiled where they are installed, against the torch that is there → what
their setup imports in addition to torch."""


@dataclass(frozen=True)
class Requirements:
    """The dependencies of rlcli and of each of its extras."""

    python: str
    """Supported Python versions, such as `>=3.11`."""
    needed: tuple[Requirement, ...]
    extras: dict[str, tuple[Requirement, ...]]


def read_requirements() -> Requirements:
    """Read the checkout's pyproject.toml, or else the metadata of the installed package."""
    from packaging.requirements import Requirement

    if is_project(PACKAGE.parent):
        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))[
            "project"
        ]
        needed = tuple(map(Requirement, project["dependencies"]))
        extras = {
            name: tuple(map(Requirement, of))
            for name, of in project["optional-dependencies"].items()
        }
        return Requirements(project["requires-python"], needed, _useful(extras))
    package = metadata.metadata("rlcli")
    every = [Requirement(line) for line in package.get_all("Requires-Dist") or []]
    named = {name: _of_extra(every, name) for name in package.get_all("Provides-Extra") or []}
    needed = tuple(requirement for requirement in every if _applies(requirement))
    return Requirements(package["Requires-Python"], needed, _useful(named))


def _of_extra(every: list[Requirement], extra: str) -> tuple[Requirement, ...]:
    """The requirements that an extra adds to those which always apply."""
    optional = (requirement for requirement in every if not _applies(requirement))
    return tuple(requirement for requirement in optional if _applies(requirement, extra))


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _useful(extras: dict[str, tuple[Requirement, ...]]) -> dict[str, tuple[Requirement, ...]]:
    return {name: of for name, of in extras.items() if name not in FOR_DEVELOPERS}


def fits(requirement: Requirement, version: str) -> bool:
    """Whether a version satisfies a requirement; a local part such as `+cpu` does not matter."""
    return requirement.specifier.contains(version, prereleases=True)


def installed_version(package: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def required(
    component: Signature, constant: Literal["REQUIRES", "SERVER_REQUIRES"] = "REQUIRES"
) -> tuple[Requirement, ...]:
    """The requirements a component declares. Raises ProjectError if they are invalid."""
    declared = component.constants.get(constant, ())
    if not declared:
        return ()
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        if not isinstance(declared, tuple | list):
            raise InvalidRequirement
        return tuple(map(Requirement, declared))
    except (InvalidRequirement, TypeError) as error:
        raise ProjectError(
            (
                f"{constant} of {component.class_name} is {declared!r}; it must be a "
                "tuple of distributions"
            ),
            where=f"{component.path}:{component.line}",
            hint='for example ("deepspeed",) or ("vllm>=0.11",)',
        ) from error


def missing_libraries(component: Signature) -> Iterator[ResourceError]:
    """An error for each distribution that a component requires and that is not installed, or whose
    version is not allowed."""
    yield from missing_of(
        f"{component.kind.removesuffix('s')} {component.name}", required(component)
    )


def missing_of(subject: str, requirements: Iterable[Requirement]) -> Iterator[ResourceError]:
    """An error for each of the distributions that `subject` needs and that is not installed, or
    whose version is not allowed; its hint is the command that installs it."""
    for requirement in requirements:
        version = installed_version(requirement.name)
        if version is not None and fits(requirement, version):
            continue
        state = "is not installed" if version is None else f"is installed in version {version}"
        yield ResourceError(
            f"{subject} needs {requirement}, which {state}",
            hint=pip_command(requirement),
            code="R75",
        )


def pip_command(requirement: Requirement) -> str:
    """The command that installs a requirement: rlcli's extra with it, in known-good versions,
    or else itself, built against the installed torch if it must be."""
    extras = read_requirements().extras
    names = {extra: {pinned.name for pinned in group} for extra, group in extras.items()}
    extra = next((extra for extra, group in names.items() if requirement.name in group), None)
    target = f"'rlcli[{extra}]'" if extra else f"'{requirement}'"
    if needed := BUILT_WITH_TORCH.get(requirement.name):
        # pip would build it in an environment that lacks torch
        return f"pip install {' '.join(needed)} && pip install --no-build-isolation {target}"
    return f"pip install {target}"


def torch_build() -> str | None:
    """`cpu`, `cuda 13.0`, `rocm 6.4`, from torch's own version file; None if unknown."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    builds = {
        name: re.search(rf"^{name}\b[^=\n]*= *'([^']+)'", text, re.MULTILINE)
        for name in ("cuda", "hip")
    }
    if builds["cuda"]:
        return f"cuda {builds['cuda'][1]}"
    return f"rocm {builds['hip'][1]}" if builds["hip"] else "cpu"
