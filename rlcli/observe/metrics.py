"""The metrics of a run: one JSON object per step in metrics.jsonl, and the same values as
TensorBoard scalars."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcli.observe.json_lines import JsonLines, Warn, is_nonfinite, plain_number, read_json_lines

log = logging.getLogger(__name__)

NONFINITE = "nonfinite"
"""JSON has no NaN: such a value is written as null, and this key holds the actual one:
{"actor/loss": "nan"}."""


class MetricsWriter:
    """Writes the records of a run. Lines that cannot be written are kept and written later;
    TensorBoard's files are abandoned with a warning."""

    def __init__(self, path: Path, tensorboard: Path | None = None, warn: Warn = log.warning):
        """`path`: the metrics.jsonl; `tensorboard`: the folder of the event files,
        None for none."""
        self.lines = JsonLines(path, warn)
        self._events = TensorBoardEvents(tensorboard, warn) if tensorboard is not None else None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the record of one step: numbers by key (`<role>/<name>`,
        `time/<call>`, `eval/<name>`)."""
        numbers = {key: plain_number(value) for key, value in values.items() if key != "step"}
        nonfinite = {key: repr(value) for key, value in numbers.items() if is_nonfinite(value)}
        finite = {key: None if key in nonfinite else value for key, value in numbers.items()}
        self.lines.write({"step": step, **finite, **({NONFINITE: nonfinite} if nonfinite else {})})
        if self._events is not None:
            self._events.write(step, numbers)

    def close(self) -> None:
        self.lines.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoardEvents:
    """TensorBoard scalars through tensorboardX.

    Its `SummaryWriter` passes events to a thread through a bounded queue and waits forever once
    that thread has died from a full disk, so events go to its file writer directly.
    """

    def __init__(self, folder: Path, warn: Warn):
        self._warn = warn
        self._writer: Any = None
        try:
            from tensorboardX.event_file_writer import EventsWriter

            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
        except Exception as error:
            self._give_up(error)

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        """One event with all numbers of a step, on disk when this returns."""
        if self._writer is None:
            return
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.proto.summary_pb2 import Summary

            scalars = [
                Summary.Value(tag=key, simple_value=float(value))
                for key, value in numbers.items()
                if isinstance(value, int | float)
            ]
            self._writer.write_event(
                Event(wall_time=time.time(), step=step, summary=Summary(value=scalars))
            )
            self._writer.flush()
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as error:
                self._give_up(error)
        self._writer = None

    def _give_up(self, error: Exception) -> None:
        """Stop writing events: a failure in a third-party plotting library costs a warning,
        not the run."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(Exception):
            writer.close()
        self._warn(f"TensorBoard files are not written: {error or type(error).__name__}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl in order, with the non-finite values restored."""
    return [with_nonfinite(record) for record in read_json_lines(path)]


def with_nonfinite(record: dict[str, Any]) -> dict[str, Any]:
    """A line's record with the non-finite values restored."""
    lost = record.pop(NONFINITE, None)
    for key, text in lost.items() if isinstance(lost, dict) else ():
        record[key] = float(text) if text in ("nan", "inf", "-inf") else None
    return record
