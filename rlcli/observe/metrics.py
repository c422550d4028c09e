"""The metrics of a run: one JSON object per step in metrics.jsonl."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import DataError
from rlcli.observe.json_lines import JsonLines, Warn, is_nonfinite, plain_number, read_json_lines
from rlcli.observe.series import number
from rlcli.observe.tail import Tail

log = logging.getLogger(__name__)

NONFINITE = "nonfinite"
"""JSON has no NaN: such a value is written as null, and this key holds the actual one:
{"actor/loss": "nan"}."""


class MetricsWriter:
    """Writes the records of a run. Lines that cannot be written are kept and written later."""

    def __init__(self, path: Path, warn: Warn = log.warning):
        """`path`: the metrics.jsonl."""
        self.lines = JsonLines(path, warn)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the record of one step: numbers by key (`<role>/<name>`,
        `time/<call>`, `eval/<name>`)."""
        self.lines.write(_line(step, values))

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add numbers to the record of a step if that is the last one, or begin its record."""
        last = next(iter(records_of(Tail(self.lines.path).last(1))), {})
        if last.get("step") == step:
            self.lines.replace_last(_line(step, {**last, **values}))
        else:
            self.write(step, values)

    def close(self) -> None:
        self.lines.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """A record as JSON has it."""
    numbers = {key: plain_number(value) for key, value in values.items() if key != "step"}
    nonfinite = {key: repr(value) for key, value in numbers.items() if is_nonfinite(value)}
    finite = {key: None if key in nonfinite else value for key, value in numbers.items()}
    return {"step": step, **finite, **({NONFINITE: nonfinite} if nonfinite else {})}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl in order, with the non-finite values restored. Raises
    DataError for a line that is none."""
    records = [with_nonfinite(record) for record in read_json_lines(path)]
    if any(type(record.get("step")) is not int for record in records):
        raise DataError("a line has no step", where=str(path), code="F31")
    return records


def records_of(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The records in lines of a metrics.jsonl, skipping those that cannot be read."""
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and number(record.get("step")) is not None:
            records.append(with_nonfinite(record))
    return records


def with_nonfinite(record: dict[str, Any]) -> dict[str, Any]:
    """A line's record with the non-finite values restored. Names are shared with other records:
    they take more memory than the numbers."""
    lost = record.pop(NONFINITE, None)
    for key, text in lost.items() if isinstance(lost, dict) else ():
        record[key] = float(text) if text in ("nan", "inf", "-inf") else None
    return {sys.intern(key): value for key, value in record.items()}
