"""Results of any number of runs: those that differ only in their seed form a group, with a mean and
a spread. Runs that did not finish are a group of their own, and a seed counts once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.errors import ResourceError
from rlcli.files import read_text
from rlcli.observe.charts import Chart, ChartLine, chart, deviation, mean_of
from rlcli.observe.metrics import read_metrics
from rlcli.observe.report import before_and_after
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_record import read_status
from rlcli.observe.series import series

WITHOUT_EFFECT = ("seed", "launch", "checkpoint", "log", "cluster")
"""Sections of a recipe in which runs of one group may differ."""
PACE = "seconds per step"
UNFINISHED = "(unfinished)"


@dataclass(frozen=True)
class Result:
    """One number over the runs of a group."""

    mean: float
    spread: float | None
    """Standard deviation; None for a single run."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed."""

    label: str
    """What distinguishes it from the other groups."""
    runs: tuple[Path, ...]
    records: tuple[list[dict[str, Any]], ...]

    def results(self) -> dict[str, Result]:
        """Results by name, the most important first: evaluations, then training, then speed."""
        values: dict[str, list[float]] = {}
        for records in self.records:
            for row in before_and_after(records):
                values.setdefault(row.label, []).append(row.after)
            if paces := sorted(series(records, "time/step")[1]):
                values.setdefault(PACE, []).append(paces[len(paces) // 2])
        return {name: _result(measured) for name, measured in values.items()}


def _result(measured: Sequence[float]) -> Result:
    spread = deviation(measured) if len(measured) > 1 else None
    return Result(sum(measured) / len(measured), spread)


def groups_of(runs: Sequence[Path]) -> list[RunGroup]:
    """The groups among these runs, in the order of the runs; of several with the same seed, the
    last one. Raises ResourceError F72, DataError F31."""
    alike: dict[tuple[str, bool], dict[str, Path]] = {}
    for run in runs:
        by_seed = alike.setdefault((identity_of(run), _is_finished(run)), {})
        by_seed[_seed_of(run)] = run
    members = [tuple(by_seed.values()) for by_seed in alike.values()]
    labels = _labels([first for first, *_ in members])
    return [
        RunGroup(label, group, tuple(map(_records, group)))
        for label, group in zip(labels, members, strict=True)
    ]


def _is_finished(run: Path) -> bool:
    """Whether it has done all its steps, as far as is known."""
    status = read_status(run)
    return status is None or status.get("state") in ("done", "unknown")


def _seed_of(run: Path) -> str:
    """The seed, as the recipe says it."""
    sections = dict(_sections(read_text(RunDirectory.open(run).resolved_recipe)))
    return sections.get("seed", "")


def group_chart(metric: str, groups: Sequence[RunGroup]) -> Chart:
    """A line for each group that has the metric, with its spread.
    Raises UsageError if none has it."""
    every = {
        f"{group.label}\0{n}": records
        for group in groups
        for n, records in enumerate(group.records)
    }
    lines_of: dict[str, list[ChartLine]] = {}
    for line in chart(metric, every).lines:
        lines_of.setdefault(line.label.rpartition("\0")[0], []).append(line)
    means = [mean_of(label, lines) for label, lines in lines_of.items()]
    return Chart(metric, [line for line in means if line.values])


def _records(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return read_metrics(file) if file.is_file() else []


def identity_of(run: Path) -> str:
    """The recipe as it ran, without what may differ within a group; comparable,
    as rlcli writes only one form."""
    directory = RunDirectory.open(run)
    try:
        text = read_text(directory.resolved_recipe)
    except OSError as error:
        message = f"{run} has no recipe to compare: {error.strerror or error}"
        hint = "the run ended before it wrote its recipe"
        raise ResourceError(
            message, where=str(directory.resolved_recipe), hint=hint, code="F72"
        ) from None
    return "".join(text_of for key, text_of in _sections(text) if key not in WITHOUT_EFFECT)


def _sections(text: str) -> list[tuple[str, str]]:
    """Key and text of each top-level key."""
    sections: list[tuple[str, str]] = []
    for line in text.splitlines(keepends=True):
        if line[:1].isspace() or not sections:
            key, rest = sections.pop() if sections else (line.partition(":")[0], "")
            sections.append((key, rest + line))
        else:
            sections.append((line.partition(":")[0], line))
    return sections


def _labels(runs: Sequence[Path]) -> list[str]:
    """Labels: what was set for each run but not for all of them; names where that does not
    distinguish them."""
    settings = [_settings(run) for run in runs]
    common = set(settings[0]).intersection(*settings[1:]) - {UNFINISHED} if settings else set()
    labels = [" ".join(setting for setting in some if setting not in common) for some in settings]
    if len(set(labels)) == len(labels) and (all(labels) or len(labels) == 1):
        return [label or runs[0].parent.name for label in labels]
    named = [
        f"{label} {'/'.join(run.parts[-2:])}".strip()
        for label, run in zip(labels, runs, strict=True)
    ]
    return [
        name if named.count(name) == 1 else str(run) for name, run in zip(named, runs, strict=True)
    ]


def _settings(run: Path) -> list[str]:
    """The overrides of a run, without the seed, and whether it is unfinished; a name for its recipe
    comes first."""
    try:
        lines = read_text(run / "recipe" / "overrides.txt").splitlines()
    except OSError:
        lines = []
    changes = [change for _, change in RunDirectory.open(run).changes_on_resume()]
    settings = {line.partition("=")[0]: line for line in lines}
    for change in changes:
        settings |= {key: f"{key}={value}" for key, value in change.items()}
    named = next((text for key, text in _sections(_head(run)) if key == "name"), "")
    overrides = [line for key, line in settings.items() if key.split(".")[0] not in WITHOUT_EFFECT]
    unfinished = [] if _is_finished(run) else [UNFINISHED]
    return [named.partition(":")[2].strip(), *overrides, *unfinished]


def _head(run: Path) -> str:
    try:
        return read_text(run / "recipe.resolved.yaml")[:4096]
    except OSError:
        return ""


def as_document(group: RunGroup) -> dict[str, Any]:
    """The JSON document for `--json`."""

    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    results_by_name = group.results().items()
    results = {
        name: {"mean": finite(result.mean), "spread": finite(result.spread)}
        for name, result in results_by_name
    }
    return {"label": group.label, "runs": [str(run) for run in group.runs], "results": results}
