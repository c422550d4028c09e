"""What a page says about runs, as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcli import __version__
from rlcli.api.metrics import metric_for
from rlcli.files import known_object
from rlcli.observe.group_comparison import PACE, RunGroup, groups_of
from rlcli.observe.json_lines import finite
from rlcli.observe.page.curves import curves_of, means_of, usual_curves
from rlcli.observe.page.timeline import timeline_of
from rlcli.observe.run_comparison import Recorded, read_run
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_overview import read_overview
from rlcli.observe.samples import iterate_samples
from rlcli.observe.series import seconds_of
from rlcli.recipe.introspection.fields import yaml_word
from rlcli.recipe.introspection.metrics import all_metrics
from rlcli.recipe.parsing.tree import dotted, is_default

Document = dict[str, Any]


def contents(runs: Sequence[Path]) -> Document:
    """The document about some runs, those that differ in their seed as one group. Raises
    ResourceError F72, DataError F31."""
    groups = groups_of(runs)
    first_runs = [read_run(group.runs[0]) for group in groups]
    names = dict.fromkeys(run.name for run in first_runs)
    curves = curves_of(groups)
    return {
        "title": ", ".join(names),
        "rlcli": __version__,
        "written": datetime.now(UTC).isoformat(timespec="minutes"),
        "groups": list(map(_group, groups, first_runs)),
        "curves": curves,
        "usual": usual_curves(list(curves)),
        "means": means_of(groups, list(curves)),
        "meanings": _meanings(list(curves)),
        "differences": _differences(first_runs),
        "samples": list(_samples(groups)),
    }


def _group(group: RunGroup, run: Recorded) -> Document:
    """What is said about a group; the recipe, the environment and the timeline are those of its
    first run."""
    peak = known_object(run.path / "memory.json").get("bytes")
    return {
        "label": group.label,
        "runs": list(map(_run, group.runs, group.records)),
        "results": list(_results(group)),
        "recipe": list(_settings(run)),
        "command": run.command,
        "environment": run.facts,
        "planned_memory": peak if isinstance(peak, int) else None,
        "timeline": timeline_of(run.path),
    }


def _results(group: RunGroup) -> Iterator[Document]:
    """The means over its runs before and after training, with the spread of the latter."""
    for label, result in group.results().items():
        if label != PACE:
            yield {
                "label": label,
                "before": finite(result.before),
                "after": finite(result.mean),
                "spread": finite(result.spread),
            }


def _run(path: Path, records: Sequence[Mapping[str, Any]]) -> Document:
    """How far a run is, and what happened to it."""
    overview = read_overview(path)
    assert overview is not None
    resumes = RunDirectory.open(path).read_resumes()
    return {
        "name": "/".join(path.parts[-2:]),
        "state": overview.state,
        "step": overview.step,
        "steps": overview.steps,
        "started": overview.started,
        "seconds": sum(map(seconds_of, records)),
        "message": overview.message,
        "resumed_after": [entry.get("step") for entry in resumes],
    }


def _settings(run: Recorded) -> Iterator[list[str]]:
    """Key, value and origin of each setting."""
    for path, value in run.settings.items():
        origin = run.values.origin(path) or ""
        yield [dotted(path), yaml_word(value), origin if is_default(origin) else _short(origin)]


def _short(origin: str) -> str:
    """`ppo_math.yaml:3:1` without the folders around it."""
    return "/".join(Path(origin).parts[-2:]) if origin.startswith("/") else origin


def _differences(runs: Sequence[Recorded]) -> list[Document]:
    """The settings in which the recipes differ, with their value in each; None where it has
    none."""
    of_runs = [run.settings for run in runs]
    keys = dict.fromkeys(key for settings in of_runs for key in settings)
    words = {dotted(key): [_word(settings, key) for settings in of_runs] for key in keys}
    return [{"key": key, "set_to": set_to} for key, set_to in words.items() if len(set(set_to)) > 1]


def _word(settings: Mapping[Any, Any], key: Any) -> str | None:
    return yaml_word(settings[key]) if key in settings else None


def _meanings(names: Sequence[str]) -> dict[str, str]:
    """Metric → its unit and meaning, where they are declared."""
    declared = {metric.name: f"{metric.meaning} ({metric.unit})" for metric in all_metrics()}
    patterns = {name: metric_for(name, declared) for name in names}
    return {name: declared[pattern] for name, pattern in patterns.items() if pattern is not None}


def _samples(groups: Sequence[RunGroup]) -> Iterator[Document]:
    """The samples of all runs, without the fields that they do not have."""
    for group, members in enumerate(groups):
        for run, folder in enumerate(members.runs):
            file = folder / "samples.jsonl"
            for sample in iterate_samples(file) if file.is_file() else ():
                yield {"group": group, "run": run, **_present(asdict(sample))}


def _present(fields: Mapping[str, Any]) -> Document:
    return {name: value for name, value in fields.items() if value is not None}
