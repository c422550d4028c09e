"""The time that a check may take."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

from rlcli.processes import seconds_in_queue
from rlcli.testing.contract import TimeIsUp


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a check that neither ends nor fails, with TimeIsUp. The seconds in which others
    computed in its place do not count."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - began >= seconds + seconds_in_queue() - queued:
            raise TimeIsUp(f"not done after {seconds:g} s")

    began, queued = time.monotonic(), seconds_in_queue()
    before = signal.signal(signal.SIGALRM, stop)
    # repeatedly, in case it is caught on the way, or too early
    others, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        remaining = max(others - (time.monotonic() - began), 0.001) if others else 0
        signal.setitimer(signal.ITIMER_REAL, remaining)
        signal.signal(signal.SIGALRM, before)


def with_line_numbers(error: BaseException) -> BaseException:
    """The error; frames of its traceback without a line get the first one of their function.

    The time limit may interrupt an instruction that belongs to no line, and pytest expects one.
    """
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    numbered: TracebackType | None = None
    for entry in reversed(entries):
        line = entry.tb_lineno  # the type says that there always is one
        if line is None or line < 0:  # -1 until Python 3.11.2
            line = entry.tb_frame.f_code.co_firstlineno
        numbered = TracebackType(numbered, entry.tb_frame, entry.tb_lasti, line)
    return error.with_traceback(numbered)
