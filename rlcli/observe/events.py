"""The events of a display as JSON lines in a pipe, for a program that shows them itself."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rlcli.api.headway import Count
from rlcli.observe.display import Display
from rlcli.observe.progress import Progress
from rlcli.observe.replay import progress_so_far
from rlcli.observe.terminal import PatientStream


class EventDisplay:
    """Implements `Display`: each event is a line with a list, its name and its arguments."""

    def __init__(self, descriptor: int):
        os.set_inheritable(descriptor, False)
        self._pipe = PatientStream(os.fdopen(descriptor, "w", encoding="utf-8"))
        self._run_dir = ""

    def start(
        self, run_name: str, run_dir: os.PathLike[str] | str, steps: int, title: str = "step"
    ) -> None:
        self._run_dir = os.fspath(run_dir)
        self._send("start", run_name, self._run_dir, steps, title)

    def take_up(self, progress: Progress) -> None:
        """Have it read from the files of the run: it is too much for a line."""
        self._send("take_up", self._run_dir, progress.steps, progress.done)

    def phase(self, text: str) -> None:
        self._send("phase", text)

    def count(self, count: Count, of: str = "") -> None:
        self._send("count", count, of)

    def step(self, record: Mapping[str, Any]) -> None:
        self._send("step", dict(record))

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        self._send("evaluation", step, dict(record))

    def note(self, text: str) -> None:
        self._send("note", text)

    def warning(self, text: str) -> None:
        self._send("warning", text)

    def finish(self, summary: str | None = None) -> None:
        self._send("finish", summary)

    def stop(self) -> None:
        self._pipe.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _send(self, name: str, *arguments: Any) -> None:
        self._pipe.write(json.dumps([name, *arguments], default=float) + "\n")
        self._pipe.flush()


SENT = ("start", "phase", "step", "evaluation", "note", "warning", "finish")


def show_event(line: str, display: Display) -> None:
    """Show an event that an `EventDisplay` of another process has sent. Anything else was written
    by other code that found the descriptor open."""
    try:
        name, *arguments = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return
    if name == "count":
        count, of = arguments
        display.count(Count(*count), of)
    elif name == "take_up":
        folder, steps, done = arguments
        display.take_up(progress_so_far(Path(folder) / "metrics.jsonl", steps, done))
    elif name in SENT:
        getattr(display, name)(*arguments)
