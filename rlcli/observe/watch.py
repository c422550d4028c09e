"""Several runs at once, a line for each, from their files."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlcli.observe.progress import Progress
from rlcli.observe.replay import FollowedRun, Look, feed, progress_of
from rlcli.observe.series import clock_time, short, sparkline
from rlcli.observe.terminal import bar, one_line, speaks_unicode

LOOK_SECONDS = 1.0
WIDEST = 120
"""Maximum width of a line, in columns."""
NAME, BAR, CURVE = 20, 8, 8
"""Columns that a name has at least, of a bar and of a curve."""
GAP = "  "

LineCells = dict[str, Text]
"""Column → what a line has in it."""
COLUMNS = ("name", "state", "steps", "bar", "value", "curve", "left")
GIVEN_UP = ("curve", "bar", "value")
"""Columns that are left out where there is no room for all, the first one first."""


class WatchedRun:
    """A run as it was when it was last looked at."""

    def __init__(self, folder: Path, name: str, look: Look):
        self.name = name
        self._files = FollowedRun(folder, look)
        self._progress = Progress("step", 0)
        self._is_begun = False
        self.overview = self._files.overview
        self.refresh()

    @property
    def is_over(self) -> bool:
        return self.overview is None or not self.overview.is_under_way

    @property
    def state(self) -> str:
        return self.overview.state if self.overview is not None else "gone"

    def refresh(self) -> None:
        """Look at it again."""
        records, is_new = self._files.refresh()
        self.overview = self._files.overview
        if self.overview is None:
            return
        if is_new or not self._is_begun:
            self._progress = progress_of(self.overview, records)
            self._is_begun = bool(records)
        else:
            for record in records:
                feed(self._progress, record)
        self._progress.steps = self.overview.steps or 0

    def cells(self, unicode: bool) -> LineCells:
        """Its name, state, progress, most telling curve and remaining time."""
        cells = dict.fromkeys(COLUMNS, Text())
        cells["name"] = Text(one_line(self.name))
        cells["state"] = Text(self.state, "yellow")
        if (run := self.overview) is not None:
            cells["state"].style = run.style
            cells["steps"] = Text(run.steps_done)
            if run.steps:
                cells["bar"] = bar(run.step, run.steps, BAR, unicode)
        for name, values in self._progress.telling_curves()[:1]:
            cells["value"] = Text(f"{name} {short(values[-1])}", "bold")
            cells["curve"] = Text(sparkline(values, CURVE, ascii_only=not unicode), "cyan")
        if not self.is_over and self._progress.eta is not None:
            cells["left"] = Text(f"eta {clock_time(self._progress.eta)}", "dim")
        return cells


def watch_runs(runs: Sequence[WatchedRun], console: Console) -> None:
    """Show runs until all are over: redrawn in a terminal, elsewhere a line whenever the state of
    one has changed."""
    if console.is_terminal:
        _draw(runs, console)
    else:
        _tell(runs, console)


def lines_of(runs: Sequence[WatchedRun], width: int, unicode: bool) -> list[Text]:
    """Their lines, in columns that fit the width: where there is no room for all of them, some are
    left out, then names lose their beginnings."""
    rows = [run.cells(unicode) for run in runs]
    widths = _widths(rows, width)
    return [_line(row, widths, width, unicode) for row in rows]


def _widths(rows: Sequence[LineCells], width: int) -> dict[str, int]:
    """The columns that are shown, with their widths."""
    natural = {column: max(row[column].cell_len for row in rows) for column in COLUMNS}
    widths = {column: columns for column, columns in natural.items() if columns}

    def room_for_names() -> int:
        return width + widths["name"] - sum(widths.values()) - len(GAP) * (len(widths) - 1)

    for column in GIVEN_UP:
        if room_for_names() < min(natural["name"], NAME):
            widths.pop(column, None)
    widths["name"] = max(1, min(natural["name"], room_for_names()))
    return widths


def _line(cells: LineCells, widths: dict[str, int], width: int, unicode: bool) -> Text:
    cells = {**cells, "name": Text(_shortened(cells["name"].plain, widths["name"], unicode))}
    shown = [cells[column].copy() for column in widths]
    for cell, (column, columns) in zip(shown, widths.items(), strict=True):
        cell.align("right" if column == "steps" else "left", columns)
    line = Text(GAP, no_wrap=True).join(shown)
    line.rstrip()
    line.truncate(width)
    return line


def _shortened(name: str, width: int, unicode: bool) -> str:
    """A name of at most this width, without its beginning if it is longer."""
    sign = "…" if unicode else "~"
    return name if len(name) <= width else sign + name[len(name) - width + 1 :]


def _draw(runs: Sequence[WatchedRun], console: Console) -> None:
    unicode = speaks_unicode(console)

    def picture() -> Group:
        return Group(*lines_of(runs, min(console.width, WIDEST), unicode))

    is_seen = sys.stdout.isatty()  # results that go to a pipe must stay there
    with Live(get_renderable=picture, console=console, redirect_stdout=is_seen):
        while not all(run.is_over for run in runs):
            time.sleep(LOOK_SECONDS)
            for run in runs:
                run.refresh()


def _tell(runs: Sequence[WatchedRun], console: Console) -> None:
    states: dict[str, str] = {}
    while True:
        lines = lines_of(runs, WIDEST, speaks_unicode(console))
        for run, line in zip(runs, lines, strict=True):
            if states.get(run.name) != run.state:
                console.print(line, soft_wrap=True)
                states[run.name] = run.state
        if all(run.is_over for run in runs):
            return
        time.sleep(LOOK_SECONDS)
        for run in runs:
            run.refresh()
