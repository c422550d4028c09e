"""Several runs at once, a line for each, from their files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlcli.observe.progress import Progress
from rlcli.observe.replay import records_of, replay
from rlcli.observe.run_overview import Overview
from rlcli.observe.series import clock_time, short, sparkline
from rlcli.observe.tail import Tail
from rlcli.observe.terminal import one_line, speaks_unicode

LOOK_SECONDS = 1.0
WIDEST = 120
"""Maximum width of a line, in columns."""
USUAL = 80
NAME, STATE, BAR, CURVE = 20, 9, 8, 8
"""Columns of a name, of a state, of a bar and of a curve; in a wider terminal names have more."""
STYLES = {"running": "green", "done": "green", "failed": "red", "died": "red"}

Look = Callable[[Path], Overview | None]


class WatchedRun:
    """A run as it was when it was last looked at."""

    def __init__(self, folder: Path, name: str, look: Look):
        self.name = name
        self._folder = folder
        self._look = look
        self._tail = Tail(folder / "metrics.jsonl")
        self._records: list[dict[str, Any]] = []
        self._progress = Progress("step", 0)
        self.overview: Overview | None = None
        """None: its folder is gone."""
        self.refresh()

    @property
    def is_over(self) -> bool:
        return self.overview is None or not self.overview.is_under_way

    @property
    def state(self) -> str:
        return self.overview.state if self.overview is not None else "gone"

    def refresh(self) -> None:
        """Look at it again."""
        # read before its metrics: a run that is over has written all of them
        self.overview = self._look(self._folder)
        lines, is_new = self._tail.lines()
        if is_new:  # it was resumed and repeats steps
            self._records = []
        self._records += records_of(lines)
        if self.overview is not None and (lines or is_new):
            steps, updated = self.overview.steps or 0, self.overview.updated or time.time()
            self._progress = replay(self._records, steps, updated)

    def line(self, width: int, name_width: int, unicode: bool) -> Text:
        """Its name, state, progress, most telling curve and remaining time; cut off at the
        width."""
        name = _shortened(self.name, name_width, unicode)
        line = Text(name.ljust(name_width + 1), no_wrap=True)
        line.append(self.state.ljust(STATE), style=STYLES.get(self.state, "yellow"))
        if self.overview is not None:
            self._append_progress(line, self.overview, unicode)
        self._append_curve(line, unicode)
        line.truncate(width, overflow="ellipsis" if unicode else "crop")
        return line

    def _append_curve(self, line: Text, unicode: bool) -> None:
        for name, values in self._progress.telling_curves()[:1]:
            line.append(f"{name} {short(values[-1]):<7}", style="bold")
            line.append(sparkline(values, CURVE, ascii_only=not unicode).ljust(CURVE + 1), "cyan")
        if not self.is_over and self._progress.eta is not None:
            line.append(f"eta {clock_time(self._progress.eta)}", style="dim")

    def _append_progress(self, line: Text, overview: Overview, unicode: bool) -> None:
        steps = f"{overview.step}/{overview.steps}" if overview.steps else str(overview.step)
        line.append(f"{steps:>9} ")
        if overview.steps:
            full, rest = ("━", "─") if unicode else ("#", "-")
            filled = min(BAR, BAR * overview.step // overview.steps)
            line.append(full * filled, style="green")
            line.append(rest * (BAR - filled), style="dim")
        line.append(" ")


def _shortened(name: str, width: int, unicode: bool) -> str:
    """A name of at most this width, without its beginning if it is longer."""
    name, sign = one_line(name), "…" if unicode else "~"
    return name if len(name) <= width else sign + name[1 - width :]


def watch_runs(runs: Sequence[WatchedRun], console: Console) -> None:
    """Show runs until all are over: redrawn in a terminal, elsewhere a line whenever the state of
    one has changed."""
    if console.is_terminal:
        _draw(runs, console)
    else:
        _tell(runs, console)


def _draw(runs: Sequence[WatchedRun], console: Console) -> None:
    unicode = speaks_unicode(console)

    def picture() -> Group:
        return Group(*_lines(runs, min(console.width, WIDEST), unicode))

    is_seen = sys.stdout.isatty()  # results that go to a pipe must stay there
    with Live(get_renderable=picture, console=console, redirect_stdout=is_seen):
        while not all(run.is_over for run in runs):
            time.sleep(LOOK_SECONDS)
            for run in runs:
                run.refresh()


def _lines(runs: Sequence[WatchedRun], width: int, unicode: bool) -> list[Text]:
    """Their lines, in columns."""
    longest = max(len(run.name) for run in runs)
    name_width = min(longest, NAME + max(0, width - USUAL))
    return [run.line(width, name_width, unicode) for run in runs]


def _tell(runs: Sequence[WatchedRun], console: Console) -> None:
    states: dict[str, str] = {}
    while True:
        lines = _lines(runs, WIDEST, speaks_unicode(console))
        for run, line in zip(runs, lines, strict=True):
            if states.get(run.name) != run.state:
                console.print(line, soft_wrap=True)
                states[run.name] = run.state
        if all(run.is_over for run in runs):
            return
        time.sleep(LOOK_SECONDS)
        for run in runs:
            run.refresh()
