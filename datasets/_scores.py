"""Rows selected and ordered by the rewards of earlier responses to them: what was always or never
solved teaches little."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlcli.errors import DataError

from ._jsonl import BadRow, Row, json_rows

SAMPLES = "samples.jsonl"
"""The file in a run's folder that holds the rewards of its samples."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Which rows to use, and in which order, by their mean reward in an earlier run."""

    path: str
    """The folder of a run, or JSON lines with a row's `id` and a `reward` (or `rewards`, a list). A
    run records `log.samples_per_step` prompts of each step."""

    min: float | None = None
    """Leave out rows with a lower mean reward."""

    max: float | None = None
    """Leave out rows with a higher mean reward."""

    unknown: Literal["keep", "drop"] = "keep"
    """What to do with rows without a recorded reward."""

    order: Literal["file", "easy_first", "hard_first"] = "file"
    """The order of the rows, with those without a reward last; train.shuffle=false preserves it."""

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min}, above max, {self.max}")

    def choose(self, rows: Sequence[Row[T]], path: str) -> tuple[list[Row[T]], str]:
        """The selected rows, and a note about the others. Raises DataError, also if no score
        belongs to these rows."""
        means = self.read()
        scored = [row for row in rows if row.id in means]
        if not scored:
            message = f"none of the {len(means)} ids in {self.path} is that of a row of {path}"
            hint = (
                f"rows are called {rows[0].id}, …; scores are of {next(iter(means), 'nothing')}, …"
            )
            raise DataError(message, hint=hint, code="F80")
        low = [row.id for row in scored if self.min is not None and means[row.id] < self.min]
        high = [row.id for row in scored if self.max is not None and means[row.id] > self.max]
        unknown = len(rows) - len(scored)
        left_out = {*low, *high}
        remaining = [
            row
            for row in rows
            if row.id not in left_out and (row.id in means or self.unknown == "keep")
        ]
        fate = "kept" if self.unknown == "keep" else "left out"
        says = (
            f"left out by scores: {len(low)} too hard, {len(high)} too easy; without a "
            f"score, {fate}: {unknown}"
        )
        if not remaining:
            raise DataError(
                f"no rows remain; {says}", hint="widen min and max, or unknown: keep", code="F80"
            )
        return self._ordered(remaining, means), says

    def _ordered(self, rows: list[Row[T]], means: dict[str, float]) -> list[Row[T]]:
        if self.order == "file":
            return rows
        sign = -1 if self.order == "easy_first" else 1
        return sorted(rows, key=lambda row: (row.id not in means, sign * means.get(row.id, 0.0)))

    def read(self) -> dict[str, float]:
        """Row → its mean reward over all training samples.
        Raises DataError for a line that is not a score."""
        file = Path(self.path).expanduser()
        file = file / SAMPLES if file.is_dir() else file
        totals: dict[str, list[float]] = {}
        for _, line, fields in json_rows(file):
            if isinstance(fields, dict) and fields.get("phase", "train") != "train":
                continue
            try:
                id_, rewards = _score(fields)
            except BadRow as error:
                raise DataError(str(error), where=f"{file}:{line}", code=error.code) from None
            totals.setdefault(id_, []).extend(rewards)
        return {id_: sum(rewards) / len(rewards) for id_, rewards in totals.items() if rewards}


def _score(fields: dict[str, Any] | BadRow) -> tuple[str, Iterable[float]]:
    """The id and the rewards in a line; no rewards if none was computed."""
    if isinstance(fields, BadRow):
        raise fields
    if "rewards" in fields:
        rewards = fields["rewards"]
    else:
        rewards = [reward for reward in [fields.get("reward", "")] if reward is not None]
    is_score = isinstance(rewards, list) and all(
        isinstance(reward, int | float) for reward in rewards
    )
    if not is_score or not isinstance(fields.get("id"), str | int):
        raise BadRow(
            f"a score needs an id and a reward; there is {', '.join(sorted(fields)) or 'nothing'}"
        )
    try:
        return str(fields["id"]), [float(reward) for reward in rewards]
    except OverflowError:
        raise BadRow("a reward is too large a number", "F82") from None
