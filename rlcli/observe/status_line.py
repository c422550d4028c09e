"""What a command is doing, on stderr while it is doing it: a line that is redrawn on a terminal, a
line every half minute elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rlcli.api.headway import Count, heard_by
from rlcli.observe.activity import Activity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

APPEARS_AFTER = 0.5
"""Seconds that something takes before it is shown."""
SILENCE = 30.0
"""Seconds without output after which a count gets a line where lines stay."""
WIDEST = 100
"""Maximum width of the line, in columns."""


def can_redraw(stream: TextIO) -> bool:
    """Whether it is a terminal with colours, on which lines can be redrawn."""
    try:
        is_terminal = stream.isatty()
    except ValueError:  # it is closed
        return False
    return is_terminal and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


@contextmanager
def status_line(say: Callable[[str], None]) -> Iterator[None]:
    """Show what is done in the block, if it is announced and takes long. `say` prints a line where
    nothing can be redrawn."""
    with heard_by(StatusLine(_console) if can_redraw(sys.stderr) else StatusLog(say)):
        yield


def _console() -> Console:
    from rlcli.observe.terminal import open_console

    return open_console(sys.stderr)


class StatusLine:
    """Implements `rlcli.api.headway.Listener`: a line at the bottom of a terminal."""

    def __init__(self, console: Callable[[], Console]):
        """`console` opens it, when something is shown for the first time."""
        self._open_console = console
        self._activity = Activity()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._live: Live | None = None

    def phase(self, text: str) -> None:
        self._activity.phase(text)
        if not text:
            self._hide()
        elif self._timer is None:
            self._timer = threading.Timer(APPEARS_AFTER, self._appear)
            self._timer.daemon = True
            self._timer.start()

    def count(self, count: Count, of: str = "") -> None:
        self._activity.count(count, of)

    def _appear(self) -> None:
        from rich.live import Live

        from rlcli.observe.terminal import speaks_unicode

        console = self._open_console()
        unicode = speaks_unicode(console)
        with self._lock:
            # what was to be shown has ended meanwhile; another phase has a timer of its own
            if self._timer is not threading.current_thread():
                return
            self._live = Live(
                get_renderable=lambda: self._activity.line(min(console.width, WIDEST), unicode),
                console=console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # results that go to a pipe must stay there
                redirect_stderr=True,
            )
            self._live.start()

    def _hide(self) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
            live, self._live = self._live, None
        if timer is not None:
            timer.cancel()
        if live is not None:
            live.stop()


class StatusLog:
    """Implements `rlcli.api.headway.Listener` where lines stay: prints a count now and then."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say = say
        self._clock = clock
        self._activity = Activity(clock)
        self._said_at = clock()

    def phase(self, text: str) -> None:
        self._activity.phase(text)

    def count(self, count: Count, of: str = "") -> None:
        self._activity.count(count, of)
        is_over = count.done >= count.total
        if not is_over and self._clock() - self._said_at >= SILENCE:
            self.note_output()
            self._say(self._activity.sentence())

    def note_output(self) -> None:
        """Note that something was printed."""
        self._said_at = self._clock()
