"""Run arguments of the verbs: a folder, the end of its path, or a recipe's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.errors import ResourceError
from rlcli.observe.run_search import NoSuchRun, find_run

if TYPE_CHECKING:
    from rlcli.observe.run_overview import Overview

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or name, or a recipe: its newest run.")]
RunsFolder = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of all runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def runs_and_metrics(words: Sequence[str], find: Callable[[str], Sequence[Path]]) -> tuple[list[Path], list[str]]:
    """The folders that words name, each once, and the words after the first that name no folder: metrics. Raises
    ResourceError F72."""
    folders: list[Path] = []
    metrics: list[str] = []
    for word in words:
        try:
            folders += [one for one in find(word) if one not in folders]
        except NoSuchRun:
            if not folders:
                raise
            metrics.append(word)
    return folders, metrics


def overview_of(name: str, runs: Path, is_running: bool = False) -> Overview:
    """The state of the named run; for a recipe, of its newest run or (`is_running`) of the one that is running.
    Raises ResourceError F72."""
    from rlcli.launch.run_jobs import with_jobs
    from rlcli.observe.run_overview import read_overview

    def is_under_way(folder: Path) -> bool:
        overview = read_overview(folder)
        return overview is not None and overview.is_under_way

    folder = find_run(name, runs, is_under_way if is_running else None)
    overview = read_overview(folder)
    if overview is None:
        raise ResourceError(f"{folder} is not the folder of a run", hint="rlcli status lists the runs", code="F72")
    return with_jobs([overview])[0]
