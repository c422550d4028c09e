"""Where components and recipes live: rlcli itself, this checkout, other installed packages,
the user's project.

A project is a folder whose pyproject.toml has a `[tool.rlcli]` table. It may hold four folders,
`interfaces`, `backends`, `datasets` and `recipes`, none of them with an `__init__.py`. Components
may be in subfolders of these, such as `interfaces/rewards/`, without an `__init__.py` either. This
repository is itself a project.

A package that is installed next to rlcli may bring the same four folders. Its entry points of the
group `rlcli` name the packages that contain them: `[project.entry-points.rlcli]`, `my_lab =
"my_lab.rlcli"`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlcli.errors import ProjectError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger(__name__)

FOLDERS = ("interfaces", "backends", "datasets", "recipes")
"""The folders of a project that rlcli reads."""

NESTED = {"environments": "interfaces"}
"""Kinds of components whose folders are in those of another kind: `interfaces/environments`."""

_TRUSTED = (os.getuid(), 0)
"""Owners whose files are trusted wherever they are."""

ENTRY_POINTS = "rlcli"
"""The group of entry points that name packages with components."""

VARIABLE = "RLCLI_PROJECT"
"""Names the user's project in every process of a run; without it the working directory decides."""

PACKAGE = Path(__file__).resolve().parent
"""The installed package; in a wheel the built-in components are in its subfolders."""


def roots() -> list[Path]:
    """Every folder that may hold component folders, in search order: rlcli, checkout, installed
    packages, user's project. Raises ProjectError."""
    checkout = [PACKAGE.parent] if is_project(PACKAGE.parent) else []  # never so in site-packages
    project = current_project()
    innermost = [PACKAGE, *checkout, *([project] if project is not None else [])]
    for root in innermost:
        _refuse_init_files(root)
    return list(dict.fromkeys([PACKAGE, *checkout, *installed_roots().values(), *innermost]))


@functools.cache
def installed_roots() -> dict[str, Path]:
    """The folders that installed packages bring, by the name of the package.
    Nothing of them is imported.

    An entry point that names no package is a warning: it must not stop those who do not need it.
    """
    folders = {}
    for name, entry, folder in installed_entry_points():
        if folder is None:
            log.warning("%s. rlcli doctor says more", misnamed(name, entry))
        else:
            folders[name] = folder
    return folders


def installed_entry_points() -> Iterator[tuple[str, EntryPoint, Path | None]]:
    """(the package's name, its entry point, the folder of components;
    None if the entry point names none)."""
    from importlib.metadata import entry_points

    for entry in sorted(
        entry_points(group=ENTRY_POINTS), key=lambda entry: (entry.name, entry.value)
    ):
        folder = module_place(entry.value)
        name = entry.dist.name if entry.dist is not None else entry.name
        yield name, entry, folder if folder is not None and folder.is_dir() else None


def misnamed(name: str, entry: EntryPoint) -> str:
    """What is wrong with an entry point of a package."""
    return (
        f"the entry point {entry.name} of {name} names {entry.value!r}, which is "
        "not an installed package"
    )


def module_place(module: str) -> Path | None:
    """Where a module is installed: the folder of a package, the file of any other module; None if
    there is none. Nothing is imported."""
    head, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(head) if head.isidentifier() else None
    except ValueError:  # it is being imported, or was put into sys.modules by hand
        return None
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *rest)
        if path.is_dir():
            return path
        if path.with_name(f"{path.name}.py").is_file():
            return path.with_name(f"{path.name}.py")
    return Path(spec.origin) if not rest and spec.has_location and spec.origin else None


T = TypeVar("T")

_KNOWN: ContextVar[dict[object, Any] | None] = ContextVar("_KNOWN", default=None)
"""Search and its arguments → its result, while no component is added, changed or removed."""


def cached_search(search: Callable[[str], T]) -> Callable[[str], T]:
    """Cache a search for the components of a kind within `search_paths_kept`."""

    @functools.wraps(search)
    def cached(kind: str) -> T:
        results = _KNOWN.get()
        if results is None:
            return search(kind)
        if (search, kind) not in results:
            results[search, kind] = search(kind)
        result: T = results[search, kind]
        return result

    return cached


@cached_search
def search_path(kind: str) -> list[str]:
    """The folders that the package of a kind is made of; `kind` is one of `FOLDERS` or `NESTED`."""
    outer = [Path(folder) for folder in search_path(NESTED[kind])] if kind in NESTED else roots()
    return [str(folder) for folder in (root / kind for root in outer) if folder.is_dir()]


def package_of(kind: str) -> str:
    """The package with the components of a kind: `rlcli.interfaces`,
    `rlcli.interfaces.environments`."""
    return f"rlcli.{NESTED[kind]}.{kind}" if kind in NESTED else f"rlcli.{kind}"


@cached_search
def component_folders(kind: str) -> list[Path]:
    """The folders that may hold components of a kind: its search path and the subfolders of it,
    such as `interfaces/rewards`. Subfolders that start with `_`, and packages, are shared code;
    those in `NESTED` belong to another kind.

    Raises ProjectError for a package whose name is that of a subfolder elsewhere:
    it would hide that one.
    """
    folders = [Path(folder) for folder in search_path(kind)]
    subfolders = [path for folder in folders for path in _subfolders(folder)]
    packages = [path for path in subfolders if (path / "__init__.py").exists()]
    names = {path.name for path in subfolders if path not in packages}
    for package in packages:
        if package.name in names:
            _refuse_init_file(package / "__init__.py", f"{kind}/{package.name}")
    inner = [path for path in subfolders if path not in packages]
    return folders + [path for path in inner if NESTED.get(path.name) != kind]


def _subfolders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.isidentifier() and entry.is_dir()]
    return [folder / name for name in sorted(names) if not name.startswith("_")]


@contextlib.contextmanager
def search_paths_kept() -> Iterator[dict[object, Any]]:
    """Cache where components are, and what their source says, within this context; the value is the
    cache. Reading one component's source asks for it hundreds of times."""
    outer = _KNOWN.get()
    cache = {} if outer is None else outer
    try:
        _KNOWN.set(cache)  # an alarm may raise an exception right after it
        yield cache
    finally:
        _KNOWN.set(outer)


def is_project(folder: Path) -> bool:
    """Whether the folder's pyproject.toml has a `[tool.rlcli]` table."""
    marker = folder / "pyproject.toml"
    try:
        status = marker.stat()
    except OSError:
        return False
    return _marks_project(marker, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)
def _marks_project(marker: Path, mtime: int, size: int) -> bool:
    """`is_project`, read once for each state of the file: every look-up of a component needs it."""
    try:
        text = marker.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    if "rlcli" not in text:  # somebody else's project: not ours to judge
        return False
    import tomllib

    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProjectError(f"not valid TOML: {error}", where=str(marker)) from error
    tool = tables.get("tool")
    return isinstance(tool, dict) and isinstance(tool.get("rlcli"), dict)


def find_project(start: Path) -> Path | None:
    """The nearest project at or above `start`.

    A project's code is run, so one that another user has planted is ignored. Raises ProjectError.
    """
    project = next((folder for folder in _upward(start.resolve()) if is_project(folder)), None)
    if project is not None:
        check_not_planted(
            project / "pyproject.toml", f"the code of project {project}", f"--project {project} …"
        )
    return project


def check_not_planted(file: Path, effect: str, trusting: str) -> None:
    """Raise ProjectError if another user may have planted a file that makes `what` run; `trusting`:
    the arguments with which the user trusts it."""
    suspect = planted(file)
    if suspect is not None:
        raise ProjectError(
            (
                "another user has put this into a folder that all may write to, and it "
                f"makes rlcli run {effect}"
            ),
            where=str(suspect),
            hint=f"if you trust it: rlcli {trusting}",
        )


def check_run_not_planted(run: Path, verb: str) -> None:
    """Check a run's folder, whose recipe decides which code is executed. Raises ProjectError if
    another user may have created it or a file in it, and the user has not named a project."""
    if VARIABLE in os.environ or not run.is_dir():
        return
    for path in (run, *run.iterdir()):
        check_not_planted(path, "the code of a project", f"--project PROJECT {verb} {run}")


def planted(path: Path) -> Path | None:
    """The reason to suspect that another user planted a path: it, or the nearest folder above it,
    that belongs to another user and is located where anybody may make files, such as in /tmp. None
    if there is none; root is trusted."""
    for folder in _upward(path.resolve()):
        try:
            if folder.parent.stat().st_mode & stat.S_IWOTH and _owner(folder) not in _TRUSTED:
                return folder
        except OSError:  # it does not exist
            continue
    return None


def _owner(file: Path) -> int:
    return file.stat().st_uid


def current_project() -> Path | None:
    """The user's project: `RLCLI_PROJECT`, else the nearest one at or above the working
    directory."""
    named = os.environ.get(VARIABLE)
    if not named:
        return find_project(Path.cwd())
    return _checked(Path(named), VARIABLE)


def use_project(folder: str | Path) -> Path:
    """Make `folder` the user's project in this process and in all that it starts (`--project`)."""
    project = _checked(Path(folder), "--project")
    os.environ[VARIABLE] = str(project)
    return project


def is_built_in(path: Path) -> bool:
    """Whether a component or recipe came with rlcli, rather than from the user's project."""
    checkout = [PACKAGE.parent / kind for kind in FOLDERS] if is_project(PACKAGE.parent) else []
    return any(path.resolve().is_relative_to(folder) for folder in [PACKAGE, *checkout])


def _upward(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.parents


def _checked(folder: Path, source: str) -> Path:
    project = folder.expanduser().resolve()
    if not project.is_dir():
        raise ProjectError(f"{source} names {folder}, which is not a folder")
    if not is_project(project):
        raise ProjectError(
            f"{source} names {project}, whose pyproject.toml does not mark it as a project",
            hint=f"put an empty table [tool.rlcli] into {project / 'pyproject.toml'}",
        )
    return project


def _refuse_init_files(root: Path) -> None:
    """An `__init__.py` in a project's `datasets` would hide Hugging Face's library from the whole
    process."""
    if root == PACKAGE:  # its own folders need one
        return
    for kind in FOLDERS:
        init = root / kind / "__init__.py"
        if init.exists():
            _refuse_init_file(init, kind)


def _refuse_init_file(init: Path, folder: str) -> None:
    raise ProjectError(
        (
            f"makes {folder}/ a package, which hides other libraries of that name and "
            f"the built-in {folder}"
        ),
        where=str(init),
        hint="delete the file; the folder needs none",
    )
