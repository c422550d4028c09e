"""The curves of a page: each metric of each group of runs, with few enough points to be drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlcli.observe.charts import ChartLine, mean, mean_of
from rlcli.observe.group_comparison import RunGroup
from rlcli.observe.plot import HEADINGS
from rlcli.observe.series import find_key, series, thinned

MOST_POINTS = 1_000
"""Points of a line; those of longer ones are means of neighbouring steps."""
DIGITS = 6
"""Significant digits of a value."""
EVALUATED = {
    "eval/accuracy": "Accuracy on held-out problems",
    "eval/reward": "Reward on held-out problems",
    "eval/loss": "Loss on held-out data",
}

TIMED = ("time/", "perf/", "tokens_per_second")
"""How the names of times and rates begin."""

Columns = list[list[Any]]
"""Steps, values and, for a group of several runs, standard deviations."""


def curves_of(groups: Sequence[RunGroup]) -> dict[str, list[Columns | None]]:
    """Metric → its columns for each group; None for a group that does not have it."""
    runs = [records for group in groups for records in group.records]
    names = dict.fromkeys(name for records in runs for record in records for name in record)
    curves = {name: [_columns(group, name) for group in groups] for name in names if name != "step"}
    return {name: of_groups for name, of_groups in curves.items() if any(of_groups)}


def means_of(groups: Sequence[RunGroup], names: Sequence[str]) -> dict[str, list[float | None]]:
    """Times and rates → their mean over all steps of each group; None for a group without any."""
    timed = [name for name in names if name.startswith(TIMED)]
    return {name: [_mean(group, name) for group in groups] for name in timed}


def _mean(group: RunGroup, metric: str) -> float | None:
    values = [value for records in group.records for value in series(records, metric)[1]]
    return mean(values) if values else None


def usual_curves(names: Sequence[str]) -> dict[str, str]:
    """Those that are shown first: metric → heading."""
    evaluated = next((name for name in EVALUATED if name in names), None)
    headings = {find_key(names, "reward"): "Reward", evaluated: EVALUATED.get(evaluated or "", "")}
    headings |= {find_key(names, curve): heading for curve, heading in HEADINGS.items()}
    return {name: heading for name, heading in headings.items() if name is not None}


def _columns(group: RunGroup, metric: str) -> Columns | None:
    """The mean of the runs of a group that have the metric, at the steps that they all have."""
    lines = [ChartLine("", *series(records, metric)) for records in group.records]
    lines = [line for line in lines if line.values]
    if not lines or not (line := mean_of(group.label, lines)).values:
        return None
    columns = [line.steps, line.values, *([line.spread] if line.spread is not None else [])]
    return [[_rounded(number) for number in thinned(column, MOST_POINTS)] for column in columns]


def _rounded(number: float) -> float:
    """With as many digits as can be told apart in a chart."""
    if number == round(number):
        return int(number)
    return round(number, DIGITS - 1 - math.floor(math.log10(abs(number))))
