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
    number: int = 0
    """Which run or group it is of: it has the same letter and colour in all charts."""


@dataclass(frozen=True)
class Chart:
    """A metric and its lines."""

    title: str
    lines: list[ChartLine]


def chart(metric: str, runs: Mapping[str, Records]) -> Chart:
    """One line for each run that has the metric, as `metric_key` finds it: the accuracy of
    evaluations is not drawn next to that of training. Raises UsageError if none has it."""
    if any(recorded(metric, records)[0] == EVALUATED_ACCURACY for records in runs.values()):
        metric = EVALUATED_ACCURACY
    lines = []
    for index, (label, records) in enumerate(runs.items()):
        _, steps, values = recorded(metric, records)
        if values:
            lines.append(ChartLine(label, steps, values, number=index))
    if not lines:
        raise _unknown(metric, runs)
    return Chart(metric, lines)


def recorded(metric: str, records: Records) -> tuple[str | None, list[float], list[float]]:
    """The key that a metric refers to in a run, None if there is none; steps and finite values."""
    key = metric_key(metric, _keys(records))
    return key, *(series(records, key) if key is not None else ([], []))


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
    spread = [deviation(column) for column in columns] if len(lines) > 1 else None
    return ChartLine(label, steps, [mean(column) for column in columns], spread)


def mean(values: Sequence[float]) -> float:
    """Exact for equal values, and finite for those of a diverged run, whose squares are not."""
    return values[0] + sum((value - values[0]) / len(values) for value in values)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample, 0 for a single value."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.hypot(*(value - middle for value in values)) / math.sqrt(len(values) - 1)


def _keys(records: Records) -> list[str]:
    return list(dict.fromkeys(key for record in records for key in record))


def _unknown(metric: str, runs: Mapping[str, Records]) -> UsageError:
    if any(recorded(metric, records)[0] is not None for records in runs.values()):
        message = f"{metric} is never a finite number in these runs"
        return UsageError(message, hint="rlcli status RUN says how a run ended")
    records = [record for some in runs.values() for record in some]
    keys = {key for record in records for key in record if number(record[key]) is not None}
    curves = {name for name in NAMES if find_key(keys, name)}
    available = (keys | curves) - {"step"}
    if not available:
        return UsageError("no run has a metric yet", hint="rlcli status says how far they are")
    names = sorted(available | {key.rpartition("/")[2] for key in available})
    hint = did_you_mean(metric, names, f"for example {', '.join(sorted(available)[:6])}")
    return UsageError(f"{metric!r} is neither a run nor a metric of these runs", hint=hint)
