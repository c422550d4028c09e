"""TensorBoard: event files in the run's folder, through tensorboardX, which needs neither torch nor
TensorFlow."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcli.files import make_folder
from rlcli.observe.trackers.contract import SAMPLE_COLUMNS, TrackedRun, Update, sample_row

PREFIX = "events"
"""Names of our files begin with it; others in the folder are left alone."""


class TensorBoardTracker:
    """Its `SummaryWriter` passes events to a thread through a bounded queue and waits forever once
    that thread has died from a full disk, so events go to its file writer directly."""

    def __init__(self) -> None:
        self._writer: Any = None

    def continues(self, run: TrackedRun, entry: str) -> bool:
        return bool(_event_files(run))

    def open(self, run: TrackedRun, entry: str | None) -> str:
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog

        make_folder(_folder(run))
        # names with the same second would be those of one file; they are read in alphabetical order
        suffix = f".{len(_event_files(run)):04}"
        self._writer = EventsWriter(str(_folder(run) / PREFIX), suffix)
        if entry is None:
            # a TensorBoard that shows the run forgets what it has read of files that are replaced
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=0, session_log=start))
            self._write_summary(
                0, [_text("recipe", _table(("key", "value", "from"), _recipe_rows(run)))]
            )
        return str(_folder(run))

    def discard(self, run: TrackedRun, entry: str) -> None:
        for file in _event_files(run):
            file.unlink()

    def write(self, updates: Sequence[Update]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        for update in updates:
            values = [
                Summary.Value(tag=key, simple_value=number)
                for key, number in update.numbers.items()
            ]
            for phase, samples in update.samples_by_phase().items():
                rows = [tuple(map(str, sample_row(sample))) for sample in samples]
                values.append(_text(f"samples/{phase}", _table(SAMPLE_COLUMNS, rows)))
            self._write_summary(update.step, values)
        self._writer.flush()

    def close(self, state: str, curve: Path | None) -> None:
        self._writer.close()

    def _write_summary(self, step: int, values: list[Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        self._writer.write_event(event)


@contextmanager
def _without_torch() -> Iterator[None]:
    """tensorboardX loads torch if it can, for what is not used here: seconds, and much memory."""
    is_loaded = "torch" in sys.modules
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)
    try:
        yield
    finally:
        if not is_loaded:
            del modules["torch"]


def _folder(run: TrackedRun) -> Path:
    return run.folder / "tensorboard"


def _event_files(run: TrackedRun) -> list[Path]:
    return [*_folder(run).glob(f"{PREFIX}*")]


def _text(tag: str, text: str) -> Any:
    """A summary of TensorBoard's plugin for text, which renders Markdown."""
    from tensorboardX.summary import text as text_summary

    (value,) = text_summary(tag, text).value
    value.tag = tag
    return value


def _recipe_rows(run: TrackedRun) -> list[tuple[str, ...]]:
    return [(key, str(value), run.origins.get(key, "")) for key, value in run.settings.items()]


def _table(columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown; what is written in a cell has no other meaning."""
    lines = [list(columns), ["---"] * len(columns), *(list(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    escaped = "".join(f"&#{ord(sign)};" if sign in SIGNS else sign for sign in text)
    return escaped.replace("\n", "<br>")


SIGNS = "\\`*_{}[]()<>#+-.!|&~"
"""Signs that mean something in Markdown or HTML."""
