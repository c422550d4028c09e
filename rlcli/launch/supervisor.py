"""The light process that watches a run: it enforces deadlines,
passes signals on and decides the exit code.

The run is a child with the same command line. It keeps the terminal and the process group, so keys,
the live display and a debugger work as if there were no other process. Whatever happens to it (a
component that calls os._exit(0), a crash, SIGKILL, a call that never returns), this process is
still there to report it; it returns 0 only if the run's own status.json says that the run is done.
Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, get_type_hints

from rlcli.errors import HangError, ResourceError, RlcliError, WorkerError
from rlcli.launch.lifeline import SHOW_STACKS, VARIABLE
from rlcli.launch.memory_kills import MemoryKills, explain_kill, memory_in_use
from rlcli.launch.orphans import adopt_orphans, end_orphans, reap_orphans
from rlcli.launch.stacks import component_line
from rlcli.launch.stopping import heeded, passed_on
from rlcli.observe.display import PlainDisplay
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_record import read_status
from rlcli.processes import STOP_SIGNALS, OwnPauses, ended_how, own_command

if TYPE_CHECKING:
    import psutil

TICK = 1.0
"""Seconds between two checks of the clock."""
PASS_ON_AFTER = 0.2
"""Seconds in which a signal that was sent to every process reaches the child by itself."""
STACKS_WITHIN = 1.0
"""Seconds that a hanging child gets to write its stacks."""
LEAVES_WITHIN = 30.0
"""Seconds that a child gets to exit after reporting its exit code."""
GONE_WITHIN = 10.0
"""Seconds for a killed child to be gone."""
STACKS_FILE = Path("logs", "stacks.log")
PARENT = "RLCLI_PARENT"
"""Environment variable with the id of a program that started this command: the run stops when that
program is gone, as it would when its terminal closes."""


@dataclass
class Facts:
    """What the child has reported about itself (see `lifeline`)."""

    run: str | None = None
    begun: bool = False
    warm_start: bool = False
    max_restarts: int = 0
    waiting: str | None = None
    limit: float = 0.0
    since: float = 0.0
    debugging: bool = False
    over: bool = False
    verdict: int | None = None

    def take(self, line: bytes, now: float) -> None:
        """Record the facts in a line. Anything else was written by other code that found the
        descriptor open."""
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            return
        types = get_type_hints(Facts)
        if not isinstance(report, dict) or not all(
            _fits(value, types.get(name)) for name, value in report.items()
        ):
            return
        for name, value in report.items():
            setattr(self, name, value)
        if "waiting" in report or "verdict" in report:
            self.since = now

    def is_late(self, now: float) -> bool:
        if self.verdict is not None:
            return now > self.since + LEAVES_WITHIN
        return self.waiting is not None and not self.debugging and now > self.since + self.limit


def _fits(value: object, kind: Any) -> bool:
    return isinstance(value, kind | int if kind is float else kind or ())


def supervise(resume: Callable[[str], Sequence[str]]) -> int:
    """Run this same command as a child process and wait for its end. Returns its exit code.

    A run that dies or hangs is resumed up to `launch.max_restarts` times, by `rlcli
    <resume(folder)>`. A resumed run that dies before it has begun is restarted by the same command,
    because its folder does not hold all of it yet. Raises WorkerError if it ended without reporting
    how, HangError if one of its calls passed its deadline, ResourceError if it could not record
    that it is done.
    """
    others = adopt_orphans()
    command, restarts = sys.argv[1:], 0
    parent = int(os.environ.pop(PARENT, 0)) or None
    while True:
        with tempfile.TemporaryFile() as stacks, _Child(command, stacks, parent) as child:
            try:
                return _see_through(child, others)
            except (WorkerError, HangError) as error:
                facts = child.facts
                if (
                    not facts.run
                    or facts.warm_start
                    or child.signals
                    or restarts == facts.max_restarts
                ):
                    raise
                restarts += 1
                again = f"{error}\nresuming the run, restart {restarts} of {facts.max_restarts}"
                PlainDisplay(sys.stderr).warning(again)
                command = [*resume(facts.run)] if facts.begun else command


def _see_through(child: _Child, others: Sequence[psutil.Process]) -> int:
    is_late = child.follow()
    code = child.process.returncode
    end_orphans(others)
    if child.facts.verdict or child.is_done():
        return child.facts.verdict or 0
    if stopped_by := _stop_signal(code, child.signals, child.facts):
        return 128 + stopped_by
    error = _late(child) if is_late else _ended(child)
    _leave_behind(child, error)
    raise error


class _Child:
    """The process that does the work, seen from outside."""

    def __init__(self, command: Sequence[str], stacks: IO[bytes], parent: int | None):
        """Start `rlcli <command>` the way that this process was started; it stops when `parent`,
        unless that is None, is not the parent of this process any more."""
        self.facts = Facts()
        self.memory = 0
        """Peak memory that was observed, in bytes."""
        self.memory_kills = MemoryKills()
        self.signals: list[int] = []
        """The STOP_SIGNALS that we received."""
        self._stacks = stacks
        self._parent = parent
        self._to_pass_on: list[tuple[float, int]] = []
        self._heard = b""
        self._pauses = OwnPauses()
        self._line, line = os.pipe()
        self._woken, self._waker = os.pipe()
        self._listened_to = [self._line, self._woken]
        for descriptor in (line, stacks.fileno()):
            os.set_inheritable(descriptor, True)
        for descriptor in (self._line, self._woken, self._waker):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # so that it wakes us up
        for number in heeded():
            signal.signal(number, self._note_signal)
        # those that a job has blocked until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heeded())
        self.process = subprocess.Popen(
            own_command(command),
            env={**os.environ, VARIABLE: f"{line}:{stacks.fileno()}:{os.getpid()}"},
            close_fds=False,
        )
        os.close(line)

    def follow(self) -> bool:
        """Wait until it has ended. Returns True if it had to be ended because a call passed its
        deadline."""
        while self.process.poll() is None:
            self._heed_end_of_parent()
            self._pass_on_signals()
            select.select(self._listened_to, [], [], PASS_ON_AFTER if self._to_pass_on else TICK)
            self._listen()
            reap_orphans(self.process.pid)
            self.memory = max(self.memory, memory_in_use(self.process.pid))
            if self.facts.is_late(time.monotonic()):
                self._end()
                self._listen()
                return True
        self._listen()
        return False

    def is_done(self) -> bool:
        """Whether the requested run is done, according to a status.json that this child wrote,
        or found complete."""
        status = self.status() if not self.facts.warm_start else {}
        return status.get("state") == "done" and (
            self.facts.over or status.get("pid") == self.process.pid
        )

    def status(self) -> dict[str, Any]:
        return (read_status(self.facts.run) or {}) if self.facts.run else {}

    def read_stacks(self) -> str:
        """The stacks that faulthandler wrote, at a crash or on request."""
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace")

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        self._to_pass_on.append((time.monotonic() + PASS_ON_AFTER, number))

    def _heed_end_of_parent(self) -> None:
        if self._parent not in (None, os.getppid()):
            self._parent = None
            self._note_signal(signal.SIGTERM, None)

    def _pass_on_signals(self) -> None:
        now = time.monotonic()
        while self._to_pass_on and self._to_pass_on[0][0] <= now:
            self.process.send_signal(passed_on(self._to_pass_on.pop(0)[1]))

    def _listen(self) -> None:
        """Read its reports. Time during which this process was suspended itself does not count
        against it."""
        now = time.monotonic()
        self.facts.since += self._pauses.since_last_look()
        for descriptor in list(self._listened_to):
            for some in _available(descriptor):
                if not some:  # it has closed the pipe; wait for its end
                    self._listened_to.remove(descriptor)
                elif descriptor == self._line:
                    self._heard += some
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self.facts.take(line, now)

    def _end(self) -> None:
        """Have it write its stacks, then end it."""
        self.process.send_signal(SHOW_STACKS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STACKS_WITHIN)
        self._kill()

    def _kill(self) -> None:
        """Kill it. If even SIGKILL does not end it, because its disk does not answer,
        it is left to the kernel."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE_WITHIN)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        signal.set_wakeup_fd(-1)
        for descriptor in (self._line, self._woken, self._waker):
            os.close(descriptor)


def _available(descriptor: int) -> Iterator[bytes]:
    """What can be read now; empty bytes once the pipe is closed."""
    some = b"-"
    with contextlib.suppress(BlockingIOError):
        while some:
            some = os.read(descriptor, 1 << 16)
            yield some


def _stop_signal(code: int, signals: list[int], facts: Facts) -> int | None:
    """The stop signal that ended it before its handlers were installed, if one did."""
    # torch's libraries abort if they are being loaded when Python raises KeyboardInterrupt
    of_ctrl_c = (128 + signal.SIGINT, *(() if facts.run else (-signal.SIGABRT,)))
    if code in of_ctrl_c and signal.SIGINT in signals:
        return signal.SIGINT
    return next((number for number in STOP_SIGNALS if -code in (number, passed_on(number))), None)


def _ended(child: _Child) -> RlcliError:
    """The error for a child that reported no exit code, or 0 although status.json does not say that
    the run is done."""
    # during a call only a component can have said so
    if child.facts.verdict == 0 and child.facts.waiting is None:
        message = "the run reports that it is done, but its status.json does not"
        again = f"make sure that the file can be written; {_hint(child)}"
        return ResourceError(message, where=child.facts.run, hint=again, code="F28")
    code, during = (
        child.process.returncode,
        f" during {child.facts.waiting}" if child.facts.waiting else "",
    )
    if code < 0:
        is_memory = child.memory_kills.happened()
        folder = Path(child.facts.run) if child.facts.run else None
        explanation = explain_kill(code, is_memory, child.memory, folder)
        message = f"the run {ended_how(code, is_memory)}{during}{explanation}"
    else:
        why = ": os._exit was called" if code == 0 else ""
        message = f"the run ended with exit code {code}{during}, before its work was done{why}"
    return WorkerError(message, where=_where(child), hint=_hint(child), code="F01")


def _late(child: _Child) -> RlcliError:
    facts = child.facts
    message = f"no answer within {facts.limit:g} s: waiting for {facts.waiting}; the run was ended"
    limits = "launch.step_deadline and launch.startup_deadline are the limits"
    return HangError(message, where=_where(child), hint=f"{limits}; {_hint(child)}")


def _where(child: _Child) -> str | None:
    return component_line(child.read_stacks())


def _hint(child: _Child) -> str:
    if not child.facts.run:
        return "nothing was trained yet; start it again"
    stacks = (
        f"{Path(child.facts.run) / STACKS_FILE} shows where it was; " if child.read_stacks() else ""
    )
    again = " and then this command again" if child.facts.warm_start else ""
    return (
        f"{stacks}rlcli resume {shlex.quote(child.facts.run)} continues from the "
        f"last checkpoint{again}"
    )


def _leave_behind(child: _Child, error: RlcliError) -> None:
    """Do what the child no longer could: write the run's status and stacks,
    and restore the terminal."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")  # the live display hides the cursor
    status = child.status()
    if status.get("pid") != child.process.pid:
        return
    with contextlib.suppress(RlcliError, OSError), RunDirectory.reopen(str(child.facts.run)) as run:
        if stacks := child.read_stacks():
            run.write_text(STACKS_FILE, stacks)
        if status.get("state") in ("starting", "running", "stopping"):
            run.write_failure(error.exit_code, str(error))
