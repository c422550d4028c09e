"""One metric of several runs or groups of runs, ready to be drawn in a terminal or as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.errors import UsageError
from rlcli.observe.series import NAMES, find_key, number, series
from rlcli.spelling import did_you_mean

EVALUATED_ACCURACY = "eval/accuracy"
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChartLine:
    """Finite values over steps."""

    label: str
    steps: list[float]
    values: list[float]
    spread: list[float] | None = None
    """Standard deviation at each step, over the runs of a group."""


@dataclass(frozen=True)
class Chart:
    """A metric and its lines."""

    title: str
    lines: list[ChartLine]


def chart(metric: str, runs: Mapping[str, Records]) -> Chart:
    """One line for each run that has the metric, as `metric_key` finds it.
    Raises UsageError if none has it."""
    lines, drawn = [], metric
    for label, records in runs.items():
        key = metric_key(metric, _keys(records))
        steps, values = series(records, key) if key is not None else ([], [])
        if values:
            lines.append(ChartLine(label, steps, values))
            drawn = EVALUATED_ACCURACY if key == EVALUATED_ACCURACY else metric
    if not lines:
        raise _unknown(metric, runs)
    return Chart(drawn, lines)


def metric_key(metric: str, keys: Sequence[str]) -> str | None:
    """The key that a metric refers to: a whole key, a curve (`reward`, `kl`), or the first key with
    that ending (`grad_norm`). `accuracy` is that of the evaluations, if there were any."""
    if metric in keys:
        return metric
    if metric == "accuracy" and EVALUATED_ACCURACY in keys:
        return EVALUATED_ACCURACY
    if metric in NAMES and (key := find_key(keys, metric)) is not None:
        return key
    return next((key for key in keys if key.endswith(f"/{metric}")), None)


def mean_of(label: str, lines: Sequence[ChartLine]) -> ChartLine:
    """The mean of lines at the steps that they all have, and its spread."""
    by_step = [dict(zip(line.steps, line.values, strict=True)) for line in lines]
    steps = sorted(set(by_step[0]).intersection(*by_step[1:]))
    columns = [[values[step] for values in by_step] for step in steps]
    means = [sum(column) / len(column) for column in columns]
    return ChartLine(
        label, steps, means, [deviation(column) for column in columns] if len(lines) > 1 else None
    )


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample, 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _keys(records: Records) -> list[str]:
    return list(dict.fromkeys(key for record in records for key in record))


def _unknown(metric: str, runs: Mapping[str, Records]) -> UsageError:
    records = [record for some in runs.values() for record in some]
    keys = {key for record in records for key in record if number(record[key]) is not None}
    curves = {name for name in NAMES if find_key(keys, name)}
    available = (keys | curves) - {"step"}
    if not available:
        return UsageError("no run has a metric yet", hint="rlcli status says how far they are")
    names = sorted(available | {key.rpartition("/")[2] for key in available})
    hint = did_you_mean(metric, names, f"for example {', '.join(sorted(available)[:6])}")
    return UsageError(f"{metric!r} is neither a run nor a metric of these runs", hint=hint)
