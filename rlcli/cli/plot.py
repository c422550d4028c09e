"""`rlcli plot`: any metric of any runs, in the terminal or as a picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.api.headway import doing
from rlcli.cli.arguments import AsJson, RunsFolder, runs_and_metrics
from rlcli.cli.output import (
    has_colour,
    print_json,
    print_styled,
    print_talk,
    speaks_unicode,
    terminal_width,
)
from rlcli.errors import UsageError
from rlcli.observe.run_search import RUNS, find_run, short_name

if TYPE_CHECKING:
    from rlcli.observe.charts import Chart

USUAL = ("reward", "eval/accuracy", "kl", "loss", "length")
"""Metrics that are drawn by default, if they exist."""
MOST_USUAL = 4
WIDEST = 100


def plot(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [METRIC]...", help="Runs, then metrics: keys, their ends, or curves."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.png", help="Write an image file instead."),
    ] = None,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> None:
    """Draw metrics of runs over their steps, in the terminal or as a picture.

    A metric is a key of metrics.jsonl (actor/grad_norm), the end of one (grad_norm), or a curve:
    reward, kl, length, loss, accuracy.

    Example: rlcli plot runs/ppo_math/20260412-093011 reward kl -o curves.png
    """
    from rlcli.observe.charts import chart

    folders, metrics = runs_and_metrics(words, lambda word: [find_run(word, runs)])
    records = {short_name(folder, runs): _records(folder) for folder in folders}
    chosen = metrics or usual_metrics(list(records.values()))
    charts = [chart(metric, records) for metric in chosen or [_missing([*records.values()])]]
    if output is not None:
        write_picture(charts, output)
    if as_json:
        documents = [
            {"metric": drawn.title, "lines": [asdict(line) for line in drawn.lines]}
            for drawn in charts
        ]
        print_json({"charts": documents, "file": str(output) if output else None})
    elif output is None:
        print_charts(charts)


def print_charts(charts: Sequence[Chart]) -> None:
    from rlcli.observe.terminal_chart import chart_lines

    width = min(terminal_width(), WIDEST)
    for number, chart in enumerate(charts):
        if number:
            print_styled(("", ""))
        for parts in chart_lines(
            chart, width, colours=has_colour(sys.stdout), unicode=speaks_unicode()
        ):
            print_styled(*parts)


def _records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run. Raises DataError F31 if they cannot be read."""
    from rlcli.observe.metrics import read_metrics

    file = folder / "metrics.jsonl"
    return read_metrics(file) if file.is_file() else []


def usual_metrics(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """The metrics to draw by default for runs with these records: those that have values."""
    from rlcli.observe.charts import recorded

    def has_values(name: str) -> bool:
        return any(recorded(name, records)[2] for records in runs)

    return [name for name in USUAL if has_values(name)][:MOST_USUAL]


def _missing(runs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The metric to name in the error for runs that have no values of any usual one. Raises
    UsageError if they have others only."""
    from rlcli.observe.charts import recorded

    for name in USUAL:
        if any(recorded(name, records)[0] for records in runs):
            return name
    others = {key for records in runs for record in records for key in record} - {"step", "time"}
    if others:
        usual = f"{', '.join(USUAL[:-1])} or {USUAL[-1]}"
        hint = f"name a metric, for example {', '.join(sorted(others)[:6])}"
        raise UsageError(f"these runs report no {usual}", hint=hint)
    return USUAL[0]


def write_picture(charts: Sequence[Chart], file: Path) -> None:
    """Write charts as a PNG, and say so. Raises UsageError, ResourceError F75."""
    from rlcli.files import not_writable, replace_file
    from rlcli.observe.chart_picture import draw_charts

    if file.suffix.lower() != ".png":
        raise UsageError(
            "-o needs a file name ending in .png", hint=f"-o {file.with_suffix('.png')}"
        )
    try:
        with doing(f"drawing {file}"):
            replace_file(file, draw_charts(charts))
    except OSError as error:
        raise not_writable(file, error, "give another --output FILE.png") from None
    print_talk(f"wrote {file}")
