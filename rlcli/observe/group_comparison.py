"""Results of any number of runs: those that differ only in their seed form a group, with a mean and
a spread. Runs that did not finish are a group of their own, and a seed counts once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcli.errors import ResourceError
from rlcli.files import read_text
from rlcli.observe.charts import Chart, ChartLine, chart, deviation, mean, mean_of
from rlcli.observe.json_lines import finite
from rlcli.observe.metrics import read_metrics
from rlcli.observe.report import MetricRow, before_and_after
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_record import read_status
from rlcli.observe.series import series

WITHOUT_EFFECT = ("seed", "launch", "checkpoint", "log", "cluster")
"""Sections of a recipe in which runs of one group may differ."""
PACE = "seconds per step"
UNFINISHED = "(unfinished)"
SAFE = "safe"
"""The kind of a change (`rlcli.recipe.changes_on_resume`) that leaves the steps as they were."""

Sections = list[tuple[str, str]]
"""Key and text of each top-level key of a recipe."""


@dataclass(frozen=True)
class Result:
    """One number over the runs of a group."""

    mean: float
    spread: float | None
    """Standard deviation; None for a single run."""
    before: float | None
    """The mean before training; None if it was measured only once."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed."""

    label: str
    """What distinguishes it from the other groups."""
    runs: tuple[Path, ...]
    records: tuple[list[dict[str, Any]], ...]

    def results(self) -> dict[str, Result]:
        """Results by name, the most important first: evaluations, then training, then speed."""
        rows: dict[str, list[MetricRow]] = {}
        for records in self.records:
            for row in [*before_and_after(records), *_pace(records)]:
                rows.setdefault(row.label, []).append(row)
        return {label: _result(of_runs) for label, of_runs in rows.items()}


def _pace(records: Sequence[Mapping[str, Any]]) -> Iterator[MetricRow]:
    if paces := sorted(series(records, "time/step")[1]):
        yield MetricRow(PACE, None, paces[len(paces) // 2])


def _result(rows: Sequence[MetricRow]) -> Result:
    after = [row.after for row in rows]
    before = [row.before for row in rows if row.before is not None]
    spread = deviation(after) if len(after) > 1 else None
    return Result(mean(after), spread, mean(before) if before else None)


@dataclass(frozen=True)
class _GroupedRun:
    """What decides which group a run belongs to, and what the group is called."""

    folder: Path
    identity: str
    seed: str
    """As the recipe says it."""
    is_finished: bool
    """Whether it has done all its steps, as far as is known."""
    settings: tuple[str, ...]
    """The name of its recipe, its overrides without the seed, and whether it is unfinished."""


def groups_of(runs: Sequence[Path]) -> list[RunGroup]:
    """The groups among these runs, in the order of the runs; of several with the same seed, the
    last one. Raises ResourceError F72, DataError F31."""
    alike: dict[tuple[str, bool], dict[str, _GroupedRun]] = {}
    for run in map(_read, runs):
        alike.setdefault((run.identity, run.is_finished), {})[run.seed] = run
    members = [tuple(by_seed.values()) for by_seed in alike.values()]
    labels = _labels([first for first, *_ in members])
    return [_group(label, of_group) for label, of_group in zip(labels, members, strict=True)]


def _group(label: str, runs: Sequence[_GroupedRun]) -> RunGroup:
    folders = tuple(run.folder for run in runs)
    return RunGroup(label, folders, tuple(map(_records, folders)))


def _read(folder: Path) -> _GroupedRun:
    """Raises ResourceError F72."""
    status = read_status(folder) or {}
    run = RunDirectory(folder, str(status["run_id"])) if status else RunDirectory.open(folder)
    sections = _recipe_of(run)
    is_finished = status.get("state") in ("done", "unknown")
    return _GroupedRun(
        folder=folder,
        identity=_identity(sections, run),
        seed=dict(sections).get("seed", ""),
        is_finished=is_finished,
        settings=tuple(_settings(run, sections, is_finished)),
    )


def group_chart(metric: str, groups: Sequence[RunGroup]) -> Chart:
    """A line for each group that has the metric, at the steps that all of its runs have, with its
    spread. Raises UsageError if none has it."""
    every = {
        f"{number}/{n}": records
        for number, group in enumerate(groups)
        for n, records in enumerate(group.records)
    }
    drawn = chart(metric, every)
    lines_of: dict[int, list[ChartLine]] = {}
    for line in drawn.lines:
        lines_of.setdefault(int(line.label.partition("/")[0]), []).append(line)
    means = [
        replace(mean_of(groups[number].label, lines), number=number)
        for number, lines in lines_of.items()
    ]
    return Chart(drawn.title, [line for line in means if line.values])


def _records(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return read_metrics(file) if file.is_file() else []


def identity_of(run: RunDirectory) -> str:
    """The recipe as it ran, without what may differ within a group; comparable,
    as rlcli writes only one form. Raises ResourceError F72."""
    return _identity(_recipe_of(run), run)


def _identity(sections: Sections, run: RunDirectory) -> str:
    """With a setting that it was resumed with, a run is not one that had it from the start."""
    return "".join([*(text for key, text in sections if _has_effect(key)), *_altered(run)])


def _altered(run: RunDirectory) -> Iterator[str]:
    """After which step a run was resumed with something that changed how it learns, and with
    what."""
    for entry in run.read_resumes():
        with suppress(KeyError, TypeError, AttributeError):
            changed = {
                change["key"]: change["now"]
                for change in entry["changes"]
                if change.get("kind") != SAFE and _has_effect(change["key"])
            }
            if changed:
                yield json.dumps([entry["step"], changed], sort_keys=True)


def _has_effect(key: str) -> bool:
    return key.split(".")[0] not in WITHOUT_EFFECT


def _recipe_of(run: RunDirectory) -> Sections:
    """Raises ResourceError F72."""
    try:
        return _sections(read_text(run.resolved_recipe))
    except OSError as error:
        message = f"{run.path} has no recipe to compare: {error.strerror or error}"
        hint = "the run ended before it wrote its recipe"
        raise ResourceError(
            message, where=str(run.resolved_recipe), hint=hint, code="F72"
        ) from None


def _sections(text: str) -> Sections:
    sections: Sections = []
    for line in text.splitlines(keepends=True):
        if line[:1].isspace() or not sections:
            key, rest = sections.pop() if sections else (line.partition(":")[0], "")
            sections.append((key, rest + line))
        else:
            sections.append((line.partition(":")[0], line))
    return sections


def _labels(runs: Sequence[_GroupedRun]) -> list[str]:
    """Labels: what was set for each run but not for all of them; names where that does not
    distinguish them."""
    settings = [set(run.settings) for run in runs]
    common = set[str]().union(*settings[:1]).intersection(*settings[1:]) - {UNFINISHED}
    labels = [_words(run.settings, common) for run in runs]
    if len(set(labels)) == len(labels) and (all(labels) or len(labels) == 1):
        return [label or _name_of(run) for label, run in zip(labels, runs, strict=True)]
    named = [f"{label} {_name_of(run)}".strip() for label, run in zip(labels, runs, strict=True)]
    folders = [str(run.folder) for run in runs]
    return [
        name if named.count(name) == 1 else folder
        for name, folder in zip(named, folders, strict=True)
    ]


def _words(settings: Sequence[str], common: Set[str]) -> str:
    return " ".join(setting for setting in settings if setting not in common)


def _name_of(run: _GroupedRun) -> str:
    return "/".join(run.folder.absolute().parts[-2:])


def _settings(run: RunDirectory, sections: Sections, is_finished: bool) -> Iterator[str]:
    try:
        lines = read_text(run.recipe / "overrides.txt").splitlines()
    except OSError:
        lines = []
    settings = {line.partition("=")[0]: line for line in lines}
    for step, change in run.changes_on_resume():
        settings |= {key: f"{key}={value} after step {step}" for key, value in change.items()}
    yield dict(sections).get("name", "").partition(":")[2].strip()
    yield from (line for key, line in settings.items() if _has_effect(key))
    if not is_finished:
        yield UNFINISHED


def as_document(group: RunGroup) -> dict[str, Any]:
    """The JSON document for `--json`."""
    results = {
        name: {"mean": finite(result.mean), "spread": finite(result.spread)}
        for name, result in group.results().items()
    }
    return {"label": group.label, "runs": [str(run) for run in group.runs], "results": results}
