"""The live display: at most a dozen lines that are redrawn in place while the run continues."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from textwrap import wrap
from typing import Any, Protocol, Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlcli.api.headway import Count, Listener
from rlcli.errors import escape_control
from rlcli.observe.activity import Activity
from rlcli.observe.display import evaluation_line
from rlcli.observe.progress import EVALUATED, Progress
from rlcli.observe.series import clock_time, short, sparkline
from rlcli.observe.terminal import bar, cut, one_line, short_path, speaks_unicode

NOW = "  now: "
LABEL_WIDTH = 10
VALUE_WIDTH = 9
LONGEST_CALL = 30
"""Maximum length of the name of a call."""
NEXT_TO_TITLE = 40
"""Columns that are left to steps, bar and remaining time."""
BETWEEN_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
WIDEST = 100
"""Maximum width of the display, in columns."""


class Drawing(Protocol):
    """Draws `LiveDisplay.picture` again and again."""

    def stop(self) -> None:
        """Draw it for the last time."""


class LiveDisplay:
    """Implements `Display`. Rich's thread redraws it twice a second, also during a step."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        setting_up: Listener | None = None,
    ):
        """`setting_up` shows what is done before the run starts."""
        self._console = console
        self._setting_up = setting_up
        self._clock = clock
        self._unicode = speaks_unicode(console)
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._activity = Activity(clock)
        self._live: Drawing | None = None

    def start(
        self, run_name: str, run_dir: os.PathLike[str] | str, steps: int, title: str = "step"
    ) -> None:
        self.stop()
        name = one_line(run_name)
        text = f"run  {name}  ->  {one_line(short_path(run_dir))}"
        self._print(text, "bold", slice(5, 5 + len(name)))
        self._progress = Progress(one_line(title), steps, self._clock)
        self._activity.phase("starting")
        self._live = self._start_drawing()
        atexit.register(self.stop)

    def _end_set_up(self) -> None:
        if self._setting_up is not None:
            self._setting_up.phase("")

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
            progress.title = self._need_progress().title
            self._progress = progress

    def phase(self, text: str) -> None:
        with self._lock:
            self._activity.phase(text)
        if self._live is None and self._setting_up is not None:
            self._setting_up.phase(text)

    def count(self, count: Count, of: str = "") -> None:
        with self._lock:
            self._activity.count(count, of)
        if self._live is None and self._setting_up is not None:
            self._setting_up.count(count, of)

    def step(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._activity.phase("")
            self._need_progress().step(record)

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        with self._lock:
            results = self._need_progress().evaluation(step, record)
        self.note(evaluation_line(step, results))

    def note(self, text: str) -> None:
        self._print(escape_control(text))

    def warning(self, text: str) -> None:
        self._print(f"warning: {escape_control(text)}", "yellow", slice(0, 8))

    def _print(self, text: str, style: str = "", styled: slice = slice(0)) -> None:
        """Print lines that stay, wrapped between words only, so that a long path can be copied."""
        lines = [
            part
            for line in text.split("\n")
            for part in wrap(line, self._console.width, **BETWEEN_WORDS) or [""]
        ]
        shown = Text("\n".join(lines))
        shown.stylize(style, styled.start, styled.stop)
        self._console.print(shown, soft_wrap=True)

    def finish(self, summary: str | None = None) -> None:
        self.stop()
        if summary:
            self.note(summary)

    def stop(self) -> None:
        with self._lock:
            self._activity.phase("")
        self._end_set_up()
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
            width = min(self._console.width, WIDEST)
            lines = self._run_lines(self._need_progress(), width)
            if activity := self._activity.line(width - len(NOW), self._unicode):
                lines.append(Text(NOW, style="dim").append_text(activity))
        for line in lines:
            line.no_wrap = True
            line.truncate(width, overflow="ellipsis" if self._unicode else "crop")
        return Group(*lines)

    def _run_lines(self, progress: Progress, width: int) -> list[Text]:
        return [
            self._progress_line(progress, width),
            *self._curve_lines(progress, width),
            *self._pace_lines(progress, width),
        ]

    def _progress_line(self, progress: Progress, width: int) -> Text:
        elapsed = clock_time(progress.elapsed)
        if not progress.steps:
            return Text.assemble(
                (f"{progress.title} {progress.done}", "bold"), f"  {elapsed} so far"
            )
        title = cut(progress.title, max(LABEL_WIDTH, width - NEXT_TO_TITLE), self._unicode)
        head = f"{title} {progress.done:>{len(str(progress.steps))}}/{progress.steps}  "
        if progress.done >= progress.steps:
            tail = f"  took {elapsed}"
        else:
            tail = (
                f"  eta {clock_time(progress.eta)}"
                if progress.eta is not None
                else f"  {elapsed} so far"
            )
        room = width - cell_len(head) - len(tail)
        filled = bar(progress.done, progress.steps, room, self._unicode)
        return Text.assemble((head, "bold"), filled, tail)

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
            shown = cut(name, LONGEST_CALL, self._unicode)
            timing = f"{dot if text else ''}{shown} {seconds:.{digits}f}"
            if len(text) + len(timing) > width - 2:
                break
            text += timing
        return [*lines, Text(f"  {text}", style="dim")] if text else lines

    def _need_progress(self) -> Progress:
        if self._progress is None:
            raise RuntimeError("a display must be started before it counts steps")
        return self._progress
