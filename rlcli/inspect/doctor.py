"""`rlcli doctor`: what is installed, what this machine offers,
what is missing and how to get it. Without torch."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlcli import __version__, registry
from rlcli.errors import RlcliError
from rlcli.inspect.devices import Gpu, list_gpus
from rlcli.inspect.findings import Finding, failure
from rlcli.inspect.machine import examine_machine
from rlcli.project import ENTRY_POINTS, current_project, installed_entry_points, misnamed
from rlcli.registry.requirements import (
    BUILT_WITH_TORCH,
    Requirements,
    fits,
    installed_version,
    pip_command,
    read_requirements,
    required,
    torch_build,
)
from rlcli.units import count

if TYPE_CHECKING:
    from packaging.requirements import Requirement

SLURM = ("sbatch", "srun", "squeue", "scancel", "sacct")
VARIABLES = (
    "CUDA_",
    "HF_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "RLCLI_",
    "SLURM_JOB",
    "TORCH",
    "TRANSFORMERS_",
)
"""Prefixes of environment variables that may explain a problem. Their names are reported,
never their values."""


def examine() -> Iterator[Finding]:
    """Everything that can be checked in a moment."""
    requirements = read_requirements()
    gpus = list_gpus()
    yield _check_python(requirements)
    yield from _check_needed(requirements)
    yield _check_torch(gpus)
    yield from _check_extras(requirements, _users_of_libraries())
    yield from _check_servers()
    yield from examine_machine(gpus)
    yield from _check_project()
    yield from _check_entry_points()
    yield _check_slurm()


def variables() -> list[str]:
    """Names of the environment variables that matter and are set."""
    return sorted(name for name in os.environ if name.startswith(VARIABLES))


def packages() -> dict[str, str | None]:
    """Every package that rlcli needs or can use → its version, None if it is not installed."""
    requirements = read_requirements()
    every = [
        *requirements.needed,
        *(requirement for of in requirements.extras.values() for requirement in of),
    ]
    return {requirement.name: installed_version(requirement.name) for requirement in every}


# -- packages --------------------------------------------------------------------------------------


def _check_python(requirements: Requirements) -> Finding:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    says = f"python {version} (needs {requirements.python}), rlcli {__version__}"
    if SpecifierSet(requirements.python).contains(version, prereleases=True):
        return Finding(level="ok", about="python", says=says)
    return Finding(
        level="FAIL",
        about="python",
        says=says,
        fix="make an environment with a newer Python",
        exit_code=1,
    )


def _check_needed(requirements: Requirements) -> Iterator[Finding]:
    good = 0
    for requirement in requirements.needed:
        version = installed_version(requirement.name)
        if version is not None and fits(requirement, version):
            good += 1
            continue
        says = (
            f"{version} is installed, rlcli needs {requirement.specifier}"
            if version
            else "is not installed"
        )
        fix = f"pip install '{requirement}'"
        yield Finding(level="FAIL", about=requirement.name, says=says, fix=fix, exit_code=1)
    says = (
        f"{good} of {len(requirements.needed)} required packages are installed in suitable versions"
    )
    if good == len(requirements.needed):
        yield Finding(level="ok", about="packages", says=says)


def _check_torch(gpus: Sequence[Gpu]) -> Finding:
    version, build = installed_version("torch"), torch_build()
    if version is None or build is None:
        return Finding(level="skip", about="torch", says="its build is unknown")
    says = (
        f"torch {version}, built for {build}; transformers "
        f"{installed_version('transformers') or 'missing'}"
    )
    if gpus and build == "cpu":
        return Finding(
            level="warn",
            about="torch",
            says=f"{says}: it cannot use the GPUs of this machine",
            fix="install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )
    return Finding(level="ok", about="torch", says=says)


def _declared(
    kinds: Collection[str], constant: Literal["REQUIRES", "SERVER_REQUIRES"] = "REQUIRES"
) -> Iterator[tuple[str, str, Sequence[Requirement]]]:
    """(kind, name, requirements) of components that declare some under this name; those whose files
    cannot be read are left out."""
    for kind in kinds:
        names: Collection[str] = ()
        with suppress(RlcliError):  # a broken project, which has a line of its own
            names = registry.names(kind)
        for name in names:
            with suppress(RlcliError):
                if requirements := required(registry.signature(kind, name), constant):
                    yield kind, name, requirements


def _users_of_libraries() -> dict[Requirement, list[str]]:
    """Requirement → the components that declare it."""
    users: dict[Requirement, list[str]] = {}
    for kind, name, requirements in _declared(registry.KINDS):
        for requirement in requirements:
            users.setdefault(requirement, []).append(f"{kind.removesuffix('s')} {name}")
    return users


def _check_extras(
    requirements: Requirements, users: Mapping[Requirement, Sequence[str]]
) -> Iterator[Finding]:
    """The extras of rlcli, and the additional requirements of the project's components."""
    in_extras = {
        requirement.name for needed in requirements.extras.values() for requirement in needed
    }
    yield from (_check_extra(extra, needed, users) for extra, needed in requirements.extras.items())
    for requirement in users:
        if requirement.name not in in_extras:
            yield _check_extra(requirement.name, [requirement], users)


def _check_extra(
    extra: str, needed: Sequence[Requirement], users: Mapping[Requirement, Sequence[str]]
) -> Finding:
    versions = {requirement: installed_version(requirement.name) for requirement in needed}
    missing = [requirement.name for requirement, version in versions.items() if version is None]
    fix = pip_command(needed[0])
    if missing:
        return Finding(
            level="skip",
            about=extra,
            says=f"{', '.join(missing)} not installed; {_who_needs(missing, users)}",
            details=_why_pip_alone_fails(missing),
            fix=fix,
        )
    installed = {requirement: version for requirement, version in versions.items() if version}
    shown = ", ".join(f"{each.name} {version}" for each, version in installed.items())
    odd = [each for each, version in installed.items() if not fits(each, version)]
    if not odd:
        return Finding(level="ok", about=extra, says=shown)
    tested = ", ".join(map(str, odd))
    says = f"{shown} installed; tested with {tested}"
    return Finding(level="warn", about=extra, says=says, fix=fix)


def _who_needs(missing: Collection[str], users: Mapping[Requirement, Sequence[str]]) -> str:
    of = [user for requirement, by in users.items() if requirement.name in missing for user in by]
    return f"only needed by {', '.join(of)}" if of else "optional"


def _check_servers() -> Iterator[Finding]:
    """How to install what the servers of the project's backends need."""
    for _, name, needed in _declared(["backends"], "SERVER_REQUIRES"):
        folder, targets = f".venv-{name}", " ".join(f"'{each}'" for each in needed)
        yield Finding(
            level="skip",
            about=name,
            says=f"servers of backend {name} have a Python of their own (`python`), with "
            f"{', '.join(map(str, needed))}",
            fix=f"python3 -m venv {folder} && {folder}/bin/pip install {targets}",
        )


def _why_pip_alone_fails(missing: Sequence[str]) -> list[str]:
    """And what else this machine lacks to build the packages that are compiled against torch."""
    built = [name for name in missing if name in BUILT_WITH_TORCH]
    if not built:
        return []
    says = (
        f"{', '.join(built)} is compiled against the installed torch by the CUDA compiler; pip "
        "alone builds it in an environment without torch, and fails"
    )
    build, reasons = torch_build(), [says]
    if build is None or not build.startswith("cuda"):
        has = f"torch here is built for {build}" if build else "torch is not installed here"
        reasons.append(f"{has}: install a CUDA build of it first")
    if shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        reasons.append(
            "no CUDA compiler here: install the toolkit of torch's CUDA version, or set CUDA_HOME"
        )
    return reasons


# -- surroundings ----------------------------------------------------------------------------------


def _check_entry_points() -> Iterator[Finding]:
    """Installed packages whose components cannot be found."""
    for name, entry, folder in installed_entry_points():
        if folder is None:
            fix = (
                f'write {ENTRY_POINTS!r} entry points as name = "package"; '
                f"then install {name} again"
            )
            yield Finding(level="warn", about=name, says=misnamed(name, entry), fix=fix)


def _check_project() -> Iterator[Finding]:
    try:
        project = current_project()
    except RlcliError as error:
        yield failure("project", error)
        return
    if project is None:
        says = "none here; the built-in components and recipes are available"
        yield Finding(level="ok", about="project", says=says)
        return
    number, broken = _own_components(project)
    says = f"{project} with {count(number, 'component')}"
    if broken:
        fix = "rlcli ls shows each; only recipes that name them are affected"
        yield Finding(
            level="warn",
            about="project",
            says=f"{says}, {len(broken)} broken",
            details=broken,
            fix=fix,
        )
    else:
        yield Finding(level="ok", about="project", says=says)


def _own_components(project: Path) -> tuple[int, list[str]]:
    """(number of the project's components, errors of those that cannot be read)."""
    count, broken = 0, []
    for kind in registry.KINDS:
        for name in registry.names(kind):
            try:
                path = registry.path_of(kind, name)
            except RlcliError as error:  # it may be that of a built-in component
                broken.append(error.what)
                continue
            if not path.is_relative_to(project):
                continue
            count += 1
            try:
                registry.signature(kind, name)
            except RlcliError as error:
                broken.append(f"{error.where or path}: {error.what}")
    return count, broken


def _check_slurm() -> Finding:
    installed = [command for command in SLURM if shutil.which(command)]
    if not installed:
        return Finding(level="skip", about="Slurm", says="no sbatch here")
    missing = [command for command in SLURM if command not in installed]
    says = ", ".join(installed)
    if missing:
        return Finding(level="warn", about="Slurm", says=f"{says}; missing: {', '.join(missing)}")
    return Finding(level="ok", about="Slurm", says=says)
