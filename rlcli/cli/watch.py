"""`rlcli watch`: several runs at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.arguments import AsJson, RunsFolder, runs_named
from rlcli.cli.attach import DIED
from rlcli.cli.output import print_json, print_talk
from rlcli.cli.status import as_document
from rlcli.observe.run_search import RUNS, find_runs, short_name

if TYPE_CHECKING:
    from rlcli.observe.watch import WatchedRun


def watch(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Runs, or folders of runs, such as a sweep; default: all that are under way.",
        ),
    ] = None,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> int:
    """Show several runs live, a line for each, until all are over: state, step, reward or loss, and
    the time that is left.

    Ctrl-C leaves them running. The exit code is 0 if all are done; with --json how they ended is
    printed. rlcli attach shows more of one run.

    Example: rlcli watch
    """
    from rlcli.launch.run_jobs import Look
    from rlcli.observe.terminal import open_console
    from rlcli.observe.watch import WatchedRun, watch_runs

    named = [folder for word in words or () for folder in runs_named(word, runs)]
    folders = list(dict.fromkeys(named)) if words else _under_way(runs)
    if not folders:
        print_talk("no run is under way; rlcli status lists those that are over")
        if as_json:
            print_json({"runs": []})
        return 0
    watched = [WatchedRun(folder, short_name(folder, runs), Look()) for folder in folders]
    try:
        watch_runs(watched, open_console(sys.stderr if as_json else sys.stdout))
    except KeyboardInterrupt:
        print_talk("the runs continue; rlcli stop RUN stops one")
        return 130
    if as_json:
        ended = [run.overview for run in watched if run.overview is not None]
        print_json({"runs": list(map(as_document, ended))})
    return max(map(_exit_code, watched))


def _under_way(runs: Path) -> list[Path]:
    from rlcli.launch.run_jobs import with_jobs
    from rlcli.observe.run_overview import read_overview

    overviews = [overview for overview in map(read_overview, find_runs(runs)) if overview]
    return [overview.folder for overview in with_jobs(overviews) if overview.is_under_way]


def _exit_code(run: WatchedRun) -> int:
    overview = run.overview
    return DIED if overview is None or overview.exit_code is None else overview.exit_code
