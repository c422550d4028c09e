"""Finds the runs below a folder, and the one that a name refers to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlcli.api.run_folder import MARKS, STATUS, is_run
from rlcli.errors import ResourceError
from rlcli.spelling import did_you_mean

RUNS = Path("runs")
"""Default folder of runs, unless `log.dir` says otherwise."""
DEPTH = 3
"""Levels of folders below RUNS: the recipe, perhaps a sweep, the run."""
LISTED = 8
"""Maximum number of runs that an error names."""


class NoSuchRun(ResourceError):
    """A name that no run has."""


def find_runs(root: Path = RUNS) -> list[Path]:
    """The folders of all runs, the most recently active first."""
    active_folders = [(_last_active(folder), folder) for folder in _walk(root, DEPTH)]
    return [
        folder for _, folder in sorted(active_folders, key=lambda entry: (-entry[0], str(entry[1])))
    ]


def find_run(name: str, root: Path = RUNS, is_meant: Callable[[Path], bool] | None = None) -> Path:
    """The run that a name refers to: its folder, a unique end of its path (`20261122-202811`), or
    its recipe, which means the newest run, or the only one that `is_meant`. Raises ResourceError
    F72 if there is none, or several."""
    folder = Path(name.replace("\0", "")).expanduser()
    if folder.is_dir() and is_run(folder):
        return folder
    path_end = Path(name.rstrip("/")).parts
    runs = find_runs(root)
    matches = [run for run in runs if path_end and run.parts[-len(path_end) :] == path_end]
    if len(matches) > 1:
        raise _ambiguous(f"{len(matches)} runs are called {name}", matches)
    matches = matches or [run for run in runs if name in run.relative_to(root).parts[:-1]]
    meant = [run for run in matches if is_meant(run)] if is_meant is not None else []
    if len(meant) > 1:
        raise _ambiguous(f"{len(meant)} runs of {name} match", meant)
    # whatever it is; opening it reports the problem
    matches = meant or matches or [folder] * folder.is_dir()
    if not matches:
        raise NoSuchRun(f"there is no run {name!r}", hint=_hint(name, runs, root), code="F72")
    return matches[0]


def named_folder(source: Path) -> Path:
    """The folder that a path is, or the run that it names; any other path, for its reader to
    report. Raises NoSuchRun for a recipe without runs, and for a path into a folder of runs."""
    if source.exists():
        return source
    try:
        return find_run(str(source))
    except NoSuchRun:
        is_below_runs = len(source.parts) > 1 and folder_of_runs(str(source.parent)) is not None
        if is_below_runs or _is_recipe(str(source)):
            raise
        return source


def folder_of_runs(name: str, root: Path = RUNS) -> Path | None:
    """The folder of several runs that a name refers to, such as a sweep, if there is one."""
    for folder in (Path(name.replace("\0", "")).expanduser(), root / name.replace("\0", "")):
        if folder.is_dir() and not is_run(folder) and next(_walk(folder, DEPTH), None) is not None:
            return folder
    return None


def short_name(run: Path, root: Path = RUNS) -> str:
    """The short name by which `find_run` finds a run from here."""
    return str(run.relative_to(root)) if run.is_relative_to(root) else str(run)


def _ambiguous(message: str, runs: Sequence[Path]) -> ResourceError:
    return ResourceError(
        message,
        hint=f"name one of them: {', '.join(str(run) for run in runs[:LISTED])}",
        code="F72",
    )


def _is_recipe(name: str) -> bool:
    from rlcli.recipe.parsing.finding import whole_recipe_names

    return name in whole_recipe_names()


def _hint(name: str, runs: list[Path], root: Path) -> str:
    if _is_recipe(name):
        return f"it is a recipe without runs in {root}; start one: rlcli train {name}"
    if not runs:
        return f"there are no runs in {root}; name the folder of the run"
    names = [short_name(run, root) for run in runs]
    return did_you_mean(short_name(Path(name), root), names) or "rlcli status lists the runs"


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    """The runs below a folder, without looking into them."""
    try:
        with os.scandir(folder) as entries:
            names = {entry.name: entry.is_dir() for entry in entries}
    except OSError:
        return
    if any(name in names for name in MARKS):
        yield folder
    elif depth:
        for name in sorted(name for name, is_folder in names.items() if is_folder):
            yield from _walk(folder / name, depth - 1)


def _last_active(run: Path) -> float:
    try:
        return (run / STATUS).stat().st_mtime
    except OSError:
        return 0.0
