"""Compares two runs by their run directories: recipe, code, environment, results."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.api.run_folder import RESOLVED_RECIPE
from rlcli.errors import ResourceError
from rlcli.files import MAX_OBJECT, known_object, read_regular
from rlcli.observe.json_lines import is_nonfinite
from rlcli.observe.metrics import read_metrics
from rlcli.observe.report import before_and_after
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_readme import repetition
from rlcli.observe.run_record import read_status
from rlcli.observe.series import series
from rlcli.observe.trackers.redaction import Redactor
from rlcli.recipe.introspection.difference import Values, values_of
from rlcli.recipe.parsing.interpolation import interpolate
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse
from rlcli.recipe.parsing.tree import KeyPath, MappingNode, plain

CODE = ("git", "rlcli_git", "rlcli")
"""Parts of environment.json that identify the code; the rest describes what it ran on."""
FACTS = ("rlcli", "rlcli_git", "git", "python", "platform", "cpus", "packages")
"""Parts for others to read. The rest names folders and computers, which concern nobody else."""
IGNORED = ("command", "executable", "working_directory")
"""Parts that differ from run to run without any effect."""


@dataclass(frozen=True)
class Recorded:
    """A run as its directory describes it."""

    path: Path
    name: str
    """Name of the recipe."""
    values: Values
    environment: Mapping[str, Any]
    """Flattened: `packages.torch` → version."""
    results: Mapping[str, float | int | str]
    """State, steps, and the last value of each result."""

    @property
    def command(self) -> str:
        """The line for a shell that starts such a run again, for others to read: without secrets;
        empty if it is not recorded."""
        words = self.environment.get("command")
        if not isinstance(words, list) or not words:
            return ""
        redactor = Redactor(os.environ)
        return repetition([str(words[0]), *(redactor.word(str(word)) for word in words[1:])])

    @property
    def settings(self) -> dict[KeyPath, Any]:
        """The values of its recipe, for others to read: without secrets."""
        redactor = Redactor(os.environ)
        return {
            path: redactor.value(value, str(path[-1])) for path, value in self.values.of.items()
        }

    @property
    def facts(self) -> dict[str, str]:
        """What it ran with, for others to read."""
        return {
            name: str(value)
            for name, value in self.environment.items()
            if name.partition(".")[0] in FACTS and value is not None
        }


@dataclass(frozen=True)
class RecordedPair:
    """One fact of two runs; None where a run lacks it."""

    name: str
    before: Any
    now: Any


def read_run(path: Path) -> Recorded:
    """Read a run, finished or not. Raises ResourceError F72 if its recipe is missing."""
    run = RunDirectory.open(path)
    recipe = recorded_recipe(path)
    origins = known_object(run.origins)
    return Recorded(
        path=run.path,
        name=str(recipe.get("name", run.path.name)),
        values=values_of(recipe, {key: str(value) for key, value in origins.items()}),
        environment=dict(_flat(known_object(run.environment))),
        results=_results(run),
    )


def code_differences(first: Recorded, second: Recorded) -> list[RecordedPair]:
    """Differences in versions and commits of the code."""
    return [
        pair
        for pair in _pairs(first.environment, second.environment)
        if pair.name.split(".")[0] in CODE
    ]


def environment_differences(first: Recorded, second: Recorded) -> list[RecordedPair]:
    """Differences in packages, Python, machine and variables."""
    pairs = _pairs(first.environment, second.environment)
    return [pair for pair in pairs if pair.name.split(".")[0] not in (*CODE, *IGNORED)]


def results(first: Recorded, second: Recorded) -> list[RecordedPair]:
    """Results of both runs, equal or not."""
    names = dict.fromkeys([*first.results, *second.results])
    return [RecordedPair(name, first.results.get(name), second.results.get(name)) for name in names]


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[RecordedPair]:
    names = dict.fromkeys([*first, *second])
    pairs = (RecordedPair(name, first.get(name), second.get(name)) for name in names)
    return [pair for pair in pairs if pair.before != pair.now]


def recorded_recipe(run: Path) -> dict[str, Any]:
    """The recipe as the run used it. Raises ResourceError F72, RecipeError."""
    path, problems = run / RESOLVED_RECIPE, Problems()
    try:
        text = read_regular(path, MAX_OBJECT).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = (
            f"{run} has no recipe to compare: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        )
        hint = "the run ended before it wrote its recipe"
        raise ResourceError(message, where=str(path), hint=hint, code="F72") from None
    tree = parse(text, str(path), problems)
    problems.raise_if_any()
    if not isinstance(tree, MappingNode):
        raise ResourceError("holds no recipe", where=str(path), code="F72")
    value = plain(interpolate(tree, problems, {}))  # `$${` was written for a literal `${`
    problems.raise_if_any()
    assert isinstance(value, dict)
    return value


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _results(run: RunDirectory) -> dict[str, float | int | str]:
    status = read_status(run.path) or {}
    records = read_metrics(run.metrics) if run.metrics.exists() else []
    values_by_name: dict[str, float | int | str] = {}
    values_by_name["state"] = str(status.get("state"))
    values_by_name["steps"] = int(status.get("step") or 0)
    for row in before_and_after(records):
        values_by_name[row.label] = str(row.after) if is_nonfinite(row.after) else row.after
    for label, key in (
        ("seconds per step", "time/step"),
        ("tokens per second", "tokens_per_second"),
    ):
        _, values = series(records, key)
        if values:
            values_by_name[label] = sorted(values)[len(values) // 2]
    return values_by_name
