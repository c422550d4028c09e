"""`rlcli report`: runs as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlcli.api.headway import doing
from rlcli.cli.arguments import AsJson, RunsFolder, runs_named
from rlcli.cli.output import print_json, print_text
from rlcli.errors import UsageError
from rlcli.observe.run_search import RUNS

PAGE = "report.html"


def report(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="Runs, or folders of runs, such as a sweep."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.html", help="Default: report.html in the run's folder."
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show a run that comes with rlcli.")] = False,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> None:
    """Write a page with the curves, responses, recipe and environment of runs, to look at in a
    browser or to send around.

    It is one file that needs no network, and its name is printed. Runs that differ only in their
    seed share a curve.

    Example: rlcli report runs/ppo_math/20260412-093011
    """
    from rlcli.files import not_writable, replace_file
    from rlcli.observe.page.contents import contents
    from rlcli.observe.page.rendering import DEMO, render_page

    if demo == bool(words):
        raise UsageError("name runs, or use --demo", hint="rlcli status lists the runs")
    named = [run for word in words or () for run in runs_named(word, runs)]
    folders = [DEMO] if demo else list(dict.fromkeys(named))
    file = output or _default_file(folders, demo)
    if file.suffix.lower() not in (".html", ".htm"):
        raise UsageError(
            "-o needs a file name ending in .html", hint=f"-o {file.with_suffix('.html')}"
        )
    with doing(f"writing {file}"):
        page = render_page(contents(folders)).encode()
    try:
        replace_file(file, page)
    except OSError as error:
        raise not_writable(file, error, "give another --output FILE.html") from None
    if as_json:
        print_json({"file": str(file), "bytes": len(page), "runs": [str(run) for run in folders]})
    else:
        print_text(str(file))


def _default_file(runs: Sequence[Path], demo: bool) -> Path:
    """In the run's folder; otherwise here, as no folder is that of several runs."""
    return Path(PAGE) if demo or len(runs) > 1 else runs[0] / PAGE
