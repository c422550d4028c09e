"""The live display: at most a dozen lines that are redrawn in place while the run continues."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlcli.errors import escape_control
from rlcli.observe.display import evaluation_line
from rlcli.observe.progress import EVALUATED, Progress
from rlcli.observe.series import clock_time, short, sparkline
from rlcli.observe.terminal import one_line, short_path, speaks_unicode

LABEL_WIDTH = 10
VALUE_WIDTH = 9
WIDEST = 100
"""Maximum width of the display, in columns."""


class Drawing(Protocol):
    """Draws `LiveDisplay.picture` again and again."""

    def stop(self) -> None:
        """Draw it for the last time."""


class LiveDisplay:
    """Implements `Display`. Rich's thread redraws it twice a second, also during a step."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._clock = clock
        self._unicode = speaks_unicode(console)
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._phase = ""
        self._live: Drawing | None = None

    def start(
        self, run_name: str, run_dir: os.PathLike[str] | str, steps: int, title: str = "step"
    ) -> None:
        self.stop()
        location = f"  ->  {one_line(short_path(run_dir))}"
        self._console.print(Text.assemble("run  ", (one_line(run_name), "bold"), location))
        self._progress = Progress(one_line(title), steps, self._clock)
        self._phase = "starting"
        self._live = self._start_drawing()
        atexit.register(self.stop)

    def _start_drawing(self) -> Drawing:
        live = Live(
            get_renderable=self.picture,
            console=self._console,
            refresh_per_second=2,
            redirect_stdout=sys.stdout.isatty(),  # results that go to a pipe must stay there
            redirect_stderr=True,
        )
        live.start()
        return live

    def take_up(self, progress: Progress) -> None:
        with self._lock:
            self._progress = progress

    def phase(self, text: str) -> None:
        with self._lock:
            self._phase = one_line(text)

    def step(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._phase = ""
            self._need_progress().step(record)

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        with self._lock:
            results = self._need_progress().evaluation(step, record)
        self.note(evaluation_line(step, results))

    def note(self, text: str) -> None:
        self._console.print(Text(escape_control(text)))

    def warning(self, text: str) -> None:
        self._console.print(Text.assemble(("warning: ", "yellow"), escape_control(text)))

    def finish(self, summary: str | None = None) -> None:
        self.stop()
        if summary:
            self.note(summary)

    def stop(self) -> None:
        with self._lock:
            self._phase = ""
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.stop)
            live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def picture(self) -> Group:
        """The current display; no line is wider than the console."""
        with self._lock:
            progress = self._need_progress()
            width = min(self._console.width, WIDEST)
            lines = [self._progress_line(progress, width), *self._curve_lines(progress, width)]
            lines += self._pace_lines(progress, width)
            if self._phase:
                lines.append(Text(f"  now: {self._phase}", style="dim"))
        for line in lines:
            line.no_wrap = True
            line.truncate(width, overflow="ellipsis" if self._unicode else "crop")
        return Group(*lines)

    def _progress_line(self, progress: Progress, width: int) -> Text:
        elapsed = clock_time(progress.elapsed)
        if not progress.steps:
            return Text.assemble(
                (f"{progress.title} {progress.done}", "bold"), f"  {elapsed} so far"
            )
        head = f"{progress.title} {progress.done:>{len(str(progress.steps))}}/{progress.steps}  "
        if progress.done >= progress.steps:
            tail = f"  took {elapsed}"
        else:
            tail = (
                f"  eta {clock_time(progress.eta)}"
                if progress.eta is not None
                else f"  {elapsed} so far"
            )
        room = max(0, width - cell_len(head) - len(tail))
        filled = min(room, room * progress.done // progress.steps)
        full, rest = ("━", "─") if self._unicode else ("#", "-")
        return Text.assemble(
            (head, "bold"), (full * filled, "green"), (rest * (room - filled), "dim"), tail
        )

    def _curve_lines(self, progress: Progress, width: int) -> list[Text]:
        """Reward or loss, the main evaluation result, KL and length, as far as the run has them."""
        lines = [
            self._curve_line(name, values, "", width) for name, values in progress.telling_curves()
        ]
        evaluated = next((name for name in EVALUATED if progress.evaluated(name)), None)
        if evaluated is not None:
            values = progress.evaluated(evaluated)
            last = max(step for step, results in progress.evaluations if evaluated in results)
            origin = f"{short(values[0])} at first, last at step {last}"
            lines.insert(1, self._curve_line(f"eval {evaluated[:3]}", values, origin, width))
        return lines

    def _curve_line(self, label: str, values: list[float], remark: str, width: int) -> Text:
        room = width - LABEL_WIDTH - VALUE_WIDTH - 4 - (len(remark) + 2 if remark else 0)
        picture = sparkline(values, min(room, 48), ascii_only=not self._unicode)
        line = Text(f"  {label:<{LABEL_WIDTH}}")
        line.append(f"{short(values[-1]):<{VALUE_WIDTH}}", style="bold")
        line.append(picture, style="cyan")
        if remark:
            line.append(f"  {remark}", style="dim")
        return line

    def _pace_lines(self, progress: Progress, width: int) -> list[Text]:
        """Seconds per step, and below how they are spent: as many calls as fit on a line,
        the longest first."""
        pace, rate = progress.seconds_per_step, progress.tokens_per_second
        if pace is None:
            return []
        tail = f"   {short(rate)} tok/s" if rate is not None else ""
        lines = [Text(f"  {'pace':<{LABEL_WIDTH}}{short(pace)} s/step{tail}")]
        dot = " · " if self._unicode else ", "
        text = ""
        for name, seconds in progress.calls:
            digits = 1 if seconds >= 10 else 2
            timing = f"{dot if text else ''}{one_line(name)} {seconds:.{digits}f}"
            if len(text) + len(timing) > width - 2:
                break
            text += timing
        return [*lines, Text(f"  {text}", style="dim")] if text else lines

    def _need_progress(self) -> Progress:
        if self._progress is None:
            raise RuntimeError("a display must be started before it counts steps")
        return self._progress
