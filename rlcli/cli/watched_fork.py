"""Verbs that run components work in a fork, which this process watches: a component that calls
`os._exit(0)` is not mistaken for completed work, one that never ends is ended, and nothing that it
has started is left running.

The fork reports through a pipe, in lines:

    stage 130 interface ppo_actor: masked tokens change nothing   it does this, for 130 s at most
    verdict 0                                                     its exit code, about to exit
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli.cli.output import print_talk
from rlcli.errors import HangError, WorkerError
from rlcli.launch import lifeline
from rlcli.launch.orphans import adopt_orphans, end_orphans, lasting_orphans, name_of
from rlcli.launch.stacks import component_line
from rlcli.processes import OwnPauses, die_with_parent, ended_how, seconds_in_queue
from rlcli.units import count

if TYPE_CHECKING:
    import psutil

WATCHED = ("check", "tokens", "test", "eval", "generate")
"""Verbs that work in a fork."""
MOST_PROCESSES = 200
"""Processes that a stage may have; those of our components start a few dozen."""
LOOK_SECONDS = 0.5
"""Seconds between two checks of the fork."""
GRACE = 10.0
"""Seconds after the limit of a stage, in which the fork can end it by itself."""
END_WITHIN = 5.0
"""Seconds for the fork to end after its verdict."""
LONGEST_LINE = 500
LONGEST_STACK = 1 << 16
SHOW_STACK = getattr(signal, "SIGRTMAX", signal.SIGURG)
"""Makes the fork write where its main thread is. No component uses that signal by mistake."""

_report: tuple[int, int] | None = None
"""In such a fork: the descriptor for its reports, and its process,
because copies of it must not write there."""


def watch_fork() -> int | None:
    """Continue in a fork of this process. Returns None in the fork and, once it has ended,
    its exit code here.

    Raises WorkerError if it ended without a verdict, started too many processes or left some
    running; HangError if it did not end a stage, or itself, in time.
    """
    others = adopt_orphans()
    reports, reporting = os.pipe()
    stacks, showing = os.pipe()
    awaited, parent = {signal.SIGINT, signal.SIGCHLD}, os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    if (pid := os.fork()) == 0:
        for descriptor in (reports, stacks):
            os.close(descriptor)
        _be_watched(parent, reporting, showing)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    for descriptor in (reporting, showing):
        os.close(descriptor)
    for descriptor in (reports, stacks):
        os.set_blocking(descriptor, False)
    fork = _WatchedFork(pid, reports, stacks, others)
    try:
        code = fork.wait(awaited)
        fork.check_nothing_left()
    finally:
        fork.end()
    return code


def _be_watched(parent: int, reporting: int, showing: int) -> None:
    """In the fork: end with the parent, and open these two descriptors for reports and stacks."""
    global _report
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    _report = lifeline.moved_out_of_the_way(reporting), os.getpid()
    faulthandler.register(SHOW_STACK, lifeline.moved_out_of_the_way(showing), all_threads=True)


def report_stage(words: str, limit_s: float) -> None:
    """Report, in the fork, what it does from now on, for at most `limit_s` seconds."""
    _send(f"stage {limit_s + GRACE:.0f} {words}")


def report_verdict(code: int) -> None:
    """Report, in the fork, that its work is done and it is about to exit with this code."""
    _send(f"verdict {code}")


def _send(line: str) -> None:
    if _report is not None and os.getpid() == _report[1]:
        line = " ".join(line.split())[:LONGEST_LINE]
        with contextlib.suppress(OSError):
            os.write(_report[0], f"{line}\n".encode("utf-8", "replace"))


class _WatchedFork:
    """The fork, as its parent sees it."""

    def __init__(self, pid: int, reports: int, stacks: int, others: Sequence[psutil.Process]):
        """`others`: children of this process that were there before."""
        self._pid = pid
        self._reports = reports
        self._stacks = stacks
        self._others = others
        self._unread = b""
        self._stage = ""
        self._deadline = math.inf
        self._pauses = OwnPauses()
        self._queued = 0.0
        self._verdict: int | None = None
        self._has_ended = False

    def wait(self, awaited: set[signal.Signals]) -> int:
        """Its exit code. Raises WorkerError, HangError."""
        while True:
            is_interrupt_for_us = _wait_for_signal(awaited, LOOK_SECONDS)
            gone, status = os.waitpid(self._pid, os.WNOHANG)
            self._read_reports()
            if gone:
                self._has_ended = True
                return self._exit_code(os.waitstatus_to_exitcode(status))
            if is_interrupt_for_us:
                os.kill(self._pid, signal.SIGINT)
            if self._stage:
                self._check_count()
            self._deadline += self._pauses.since_last_look() + self._in_queue()
            if time.monotonic() > self._deadline:
                return self._overdue()

    def _in_queue(self) -> float:
        """For how many of the seconds since the last look others computed in its place."""
        before, self._queued = self._queued, seconds_in_queue(self._pid)
        return max(0.0, self._queued - before)

    def check_nothing_left(self) -> None:
        """Raises WorkerError if a command whose stages are watched has left processes running."""
        if self._stage and (left := lasting_orphans(self._others)):
            names = ", ".join(map(name_of, left))
            message = f"the command left {count(len(left), 'process')} running: {names}"
            raise WorkerError(message, hint="a component must end what it starts", code="F01")

    def end(self) -> None:
        """End it, and whatever it has started."""
        self._kill()
        end_orphans(self._others)

    def _kill(self) -> None:
        if not self._has_ended:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._has_ended = True

    def _read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while text := os.read(self._reports, 1 << 16):
                *lines, self._unread = (self._unread + text).split(b"\n")
                for line in lines:
                    self._take(line.decode("utf-8", "replace"))
                self._unread = self._unread[-LONGEST_LINE:]

    def _take(self, line: str) -> None:
        """Record a report. Anything else is ignored: a component may have written it."""
        if match := re.fullmatch(r"stage (\d+) (.*)", line):
            self._deadline = time.monotonic() + int(match[1])
            self._stage = match[2]
        elif match := re.fullmatch(r"verdict (\d+)", line):
            self._deadline = time.monotonic() + END_WITHIN
            self._verdict = int(match[1])

    def _exit_code(self, code: int) -> int:
        """The exit code of a fork that ended with `code`."""
        if code == self._verdict:
            return code
        if code == -signal.SIGINT:
            return 128 + signal.SIGINT
        during = f" during: {self._stage}" if self._stage else ", before its work was done"
        hint = "a component may have called os._exit"
        if code < 0:
            hint = "its last output may show where"
        raise WorkerError(f"the command {ended_how(code, False)}{during}", hint=hint, code="F01")

    def _check_count(self) -> None:
        """Raises WorkerError."""
        import psutil

        running = len(psutil.Process().children(recursive=True)) - len(self._others)
        if running > MOST_PROCESSES:
            message = f"{running} processes are running during: {self._stage}"
            hint = f"a component may start {MOST_PROCESSES}, and must wait for each to end"
            raise WorkerError(message, hint=hint, code="F01")

    def _overdue(self) -> int:
        """The fork is past its deadline. Returns its verdict, if it has given it."""
        position = self._position()
        if self._verdict is not None:
            self._kill()
            print_talk(f"warning: the command is done, but did not exit{position}; ending it now")
            return self._verdict
        raise HangError(
            f"not done in time, and could not be interrupted: {self._stage}{position}",
            hint="a component may catch every exception, or wait outside Python",
        )

    def _position(self) -> str:
        """Where its main thread is, as `, at FILE:LINE`."""
        os.kill(self._pid, SHOW_STACK)
        time.sleep(LOOK_SECONDS)
        stack = b""
        with contextlib.suppress(BlockingIOError):
            stack = os.read(self._stacks, LONGEST_STACK)
        line = component_line(stack.decode("utf-8", "replace"))
        return f", at {line}" if line else ""


def _wait_for_signal(awaited: set[signal.Signals], seconds: float) -> bool:
    """Wait at most `seconds` for one of these signals. Returns whether it is an interrupt that
    was sent to this process alone: the terminal interrupts the fork too. Where a signal does not
    tell its sender, every interrupt counts as the terminal's.
    """
    if not hasattr(signal, "sigtimedwait"):
        time.sleep(min(seconds, 0.05))
        if pending := signal.sigpending() & awaited:
            signal.sigwait(pending)
        return False
    came = signal.sigtimedwait(awaited, seconds)
    return came is not None and came.si_signo == signal.SIGINT and came.si_code <= 0
