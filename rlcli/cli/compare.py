"""`rlcli compare`: the results of several runs, aggregated over seeds, as a table and as curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.api.headway import doing
from rlcli.cli.arguments import AsJson, RunsFolder, runs_and_metrics, runs_named
from rlcli.cli.output import print_json, print_table, print_text, wrapped
from rlcli.cli.plot import print_charts, usual_metrics, write_picture
from rlcli.errors import UsageError
from rlcli.observe.run_search import RUNS, short_name
from rlcli.observe.series import short
from rlcli.observe.terminal_chart import letter

if TYPE_CHECKING:
    from rlcli.observe.charts import Chart
    from rlcli.observe.group_comparison import Result, RunGroup

COLUMNS = (
    ("held-out accuracy", "held-out reward", "held-out loss"),
    ("reward in training", "loss"),
    ("KL from the reference",),
    ("seconds per step",),
)
"""The first available result of each list is shown; --json has all."""
LONGEST_LABEL = 30
"""Maximum characters of a label that is in the table; others are below it."""


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [METRIC]...",
            help="Runs or folders of runs, such as a sweep; then metrics.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.png", help="Write the curves to an image file instead."
        ),
    ] = None,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> None:
    """Compare the results of runs. Those that differ only in their seed share a row and a curve:
    mean ± standard deviation. Unfinished runs have rows of their own, and a seed counts once. Below
    the table are the folders of each row; its letter is that of its curve.

    rlcli diff shows what was set differently.

    Example: rlcli compare runs/ppo_math/20260412-093011 reward
    """
    from rlcli.observe.group_comparison import as_document, groups_of

    folders, metrics = runs_and_metrics(words, lambda word: runs_named(word, runs))
    with doing("reading runs"):
        groups = groups_of(folders)
    charts = _charts(groups, metrics)
    if not charts and (metrics or output is not None):
        raise _nothing_to_draw(metrics)
    if output is not None:
        write_picture(charts, output)
    if as_json:
        print_json(
            {
                "groups": [as_document(group) for group in groups],
                "file": str(output) if output else None,
            }
        )
        return
    print_groups(groups, runs)
    if repeated := len(folders) - sum(len(group.runs) for group in groups):
        times = "1 run is" if repeated == 1 else f"{repeated} runs are"
        print_text(f"{times} left out: a later one has the same recipe and seed")
    if output is None and charts:
        print_text()
        print_charts(charts)


def _charts(groups: Sequence[RunGroup], metrics: Sequence[str]) -> list[Chart]:
    """Those of some metrics, by default the usual ones, that have a curve. Raises UsageError."""
    from rlcli.observe.group_comparison import group_chart

    chosen = metrics or usual_metrics([records for group in groups for records in group.records])
    charts = [group_chart(name, groups) for name in chosen]
    return [chart for chart in charts if chart.lines]


def _nothing_to_draw(metrics: Sequence[str]) -> UsageError:
    of = f" of {', '.join(metrics)}" if metrics else ""
    hint = "a step is drawn if all runs of a row have it: name other runs or metrics"
    return UsageError(f"there is nothing to draw{of}", hint=hint)


def print_groups(groups: Sequence[RunGroup], runs: Path = RUNS) -> None:
    """Print the table, a row for each group, and below it the runs of each."""
    names, measures = _measures(groups)
    are_long = any(len(group.label) > LONGEST_LABEL for group in groups)
    labels = ["" if are_long else group.label for group in groups]
    heads = [f"{letter(number)}  {label}" for number, label in enumerate(labels)]
    counts = [(str(len(group.runs)), _steps(group)) for group in groups]
    rows = [(head, *count, *row) for head, count, row in zip(heads, counts, measures, strict=True)]
    print_table(["", "runs", "steps", *names], rows, numbers=True)
    print_text()
    for number, group in enumerate(groups):
        print_text(_below(letter(number), group, runs, is_label_long=are_long))


def _measures(groups: Sequence[RunGroup]) -> tuple[list[str], list[list[str]]]:
    """The names of the results to show, and those of each group."""
    results_by_group = [group.results() for group in groups]
    measured = {name for results in results_by_group for name in results}
    available = [[name for name in column if name in measured] for column in COLUMNS]
    names = [column[0] for column in available if column]
    return names, [[_text(results.get(name)) for name in names] for results in results_by_group]


def _below(head: str, group: RunGroup, runs: Path, *, is_label_long: bool) -> str:
    """What is below the table: the label of a group, if that is not in it, and its folders."""
    label = f"{group.label}: " if is_label_long else ""
    folders = ", ".join(short_name(run, runs) for run in group.runs)
    return wrapped(f"{label}{folders}", f"{head}  ", rest="   ")


def _steps(group: RunGroup) -> str:
    """The last step of its runs, of the first and of the last to end."""
    reached = [
        max((int(record["step"]) for record in records), default=0) for records in group.records
    ]
    fewest, most = min(reached), max(reached)
    return str(most) if fewest == most else f"{fewest} to {most}"


def _text(result: Result | None) -> str:
    if result is None:
        return "-"
    return short(result.mean) + (f" ±{result.spread:.2g}" if result.spread is not None else "")
