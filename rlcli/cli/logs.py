"""`rlcli logs`: the logs of a run's processes, past and current."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.arguments import AsJson, RunName, RunsFolder, overview_of
from rlcli.cli.output import flush, print_json, print_text, write_text
from rlcli.errors import ResourceError
from rlcli.observe.run_search import RUNS

if TYPE_CHECKING:
    from rlcli.observe.run_overview import Overview

LOOK_SECONDS = 0.25


def logs(
    run: RunName,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Only the log of this rank.")
    ] = None,
    lines: Annotated[
        int,
        typer.Option(
            "--lines", "-n", metavar="N", min=0, help="How many of the last lines of each log."
        ),
    ] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> None:
    """Print the last lines of a run's logs, each with the name of the process that wrote it.

    With --follow and --json each line is a JSON object of its own.

    Example: rlcli logs runs/ppo_math/20260412-093011 --rank 0
    """
    from rlcli.observe.run_logs import as_text
    from rlcli.observe.tail import last_lines

    overview = overview_of(run, runs)
    files = _files(overview, rank, follow)
    # of a run that is followed, more logs may come
    several = len(files) > 1 or (follow and rank is None)
    say = _as_json_line if as_json else _as_text(files, several)
    if follow:
        _follow(overview, rank, lines, say)
        return
    last = {
        name: [as_text(line) for line in last_lines(file, lines)] for name, file in files.items()
    }
    if as_json:
        described = {name: {"file": str(files[name]), "lines": last[name]} for name in files}
        print_json({"run": str(overview.folder), "logs": described})
        return
    for name, found_lines in last.items():
        for line in found_lines:
            say(name, line)


def _files(overview: Overview, rank: int | None, may_come: bool) -> Mapping[str, Path]:
    """The requested logs. Raises ResourceError if there are none and none can be expected."""
    from rlcli.observe.run_logs import run_logs

    files = run_logs(overview.folder)
    requested = (
        files
        if rank is None
        else {name: file for name, file in files.items() if name == f"rank{rank}"}
    )
    if requested or (may_come and overview.is_under_way):
        return requested
    if files:
        available = ", ".join(files)
        raise ResourceError(
            f"{overview.folder} has no log of rank {rank}",
            hint=f"it has logs of {available}",
            code="F72",
        )
    raise ResourceError(
        f"{overview.folder} has no logs", hint=_why_there_are_none(overview), code="F72"
    )


def _why_there_are_none(overview: Overview) -> str:
    look = f"rlcli status {shlex.quote(str(overview.folder))}"
    if overview.state in ("submitted", "waiting"):
        return f"job {overview.job} has not begun; {look} shows why it waits"
    if overview.job is not None:
        return f"job {overview.job} has not written any: {look} says how it ended"
    return f"its process (launch=inline) has printed nothing in a call; {look} says how it ended"


def _as_text(files: Mapping[str, Path], several: bool) -> Callable[[str, str], None]:
    """A function that prints lines, with their origin if they are those of several files."""
    width = max(map(len, files), default=0)

    def say(name: str, line: str) -> None:
        print_text(f"{name:<{width}}  {line}" if several else line)
        flush()

    return say


def _as_json_line(name: str, line: str) -> None:
    from rlcli.observe.json_lines import encode

    write_text(encode({"log": name, "line": line}) + "\n")
    flush()


def _follow(
    overview: Overview, rank: int | None, count: int, say: Callable[[str, str], None]
) -> None:
    """Start with the last `count` lines, and continue until the run is over and all its output is
    printed."""
    from rlcli.launch.run_jobs import Look
    from rlcli.observe.run_logs import as_text, run_logs
    from rlcli.observe.tail import Tail

    look = Look()
    tails: dict[str, Tail] = {}
    is_first = True
    while True:
        now = look(overview.folder)
        for name, file in run_logs(overview.folder).items():
            if rank is None or name == f"rank{rank}":
                tail = tails.setdefault(name, Tail(file))
                for line in tail.last(count) if is_first else tail.lines()[0]:
                    say(name, as_text(line))
        if now is None or not now.is_under_way:
            break
        is_first = False
        time.sleep(LOOK_SECONDS)
    for name, tail in tails.items():
        if line := tail.unfinished_line():
            say(name, as_text(line))
