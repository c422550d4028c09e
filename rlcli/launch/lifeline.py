"""A supervised run's pipe to its supervisor: JSON lines about what it is doing,
so that its end can be reported.

    {"run": "/…/runs/ppo_math/20260412-093011", "warm_start": false, "max_restarts": 0}
                                                 it works in this folder from here on
    {"begun": true}                              everything requested has been written there
    {"waiting": "actor_train", "limit": 3600}    a call began that may take this many seconds
    {"waiting": null}                            the call ended
    {"debugging": true}                          someone is at a breakpoint: deadlines are off
    {"run": "/…", "over": true}                  the run to resume was already complete
    {"verdict": 0}                               its exit code; it is about to exit

Without a supervisor nothing is sent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlcli.launch.stopping import as_sent, heeded, passed_on
from rlcli.processes import ProcessRecord, die_with_parent, start_time

VARIABLE = "RLCLI_SUPERVISOR"
"""Descriptor of the pipe, descriptor for stacks, process id of the supervisor."""
SHOW_STACKS = getattr(signal, "SIGRTMIN", signal.SIGURG)
"""Makes a supervised process write the stacks of its threads. Not every system has real-time
signals; SIGURG is ignored by whoever does not expect it."""
DEBUGGERS = ("builtins.breakpoint", "pdb.Pdb")
"""Audit events that reveal a debugger. Replacing sys.breakpointhook would add a frame to the user's
stack."""

OUT_OF_THE_WAY = 128
"""The pipe's descriptor is at least this, so that no component closes or writes to it by
mistake."""

supervisor: ProcessRecord | None = None
"""The process that watches this one."""
_line: int | None = None
_process: int | None = None
"""The process that reports. A copy that a component forks must not."""


def attach() -> bool:
    """Whether this process is supervised; if so, tie it to its supervisor's lifetime,
    signals and requests."""
    global _line, _process, supervisor
    value = os.environ.pop(VARIABLE, None)
    if value is None:
        return False
    line, stacks, parent = (int(number) for number in value.split(":"))
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)  # it had already exited
    line, stacks = (moved_out_of_the_way(descriptor) for descriptor in (line, stacks))
    _line, _process = line, os.getpid()
    supervisor = ProcessRecord(socket.gethostname(), parent, start_time(parent) or "")
    faulthandler.enable(stacks)
    faulthandler.register(SHOW_STACKS, stacks, all_threads=True)
    for number in heeded():
        signal.signal(passed_on(number), _take_as_sent)
    sys.addaudithook(_notice_debuggers)
    return True


def report(**facts: Any) -> None:
    """Send facts to the supervisor, if there is one. If a component has closed the pipe,
    nothing is sent."""
    if _line is not None and os.getpid() == _process:
        with contextlib.suppress(OSError):
            os.write(_line, (json.dumps(facts) + "\n").encode())


@contextmanager
def waiting(activity: str, limit: float) -> Iterator[None]:
    """Context of a call that may take `limit` seconds; the supervisor ends this process if it takes
    longer."""
    report(waiting=activity, limit=limit)
    try:
        yield
    finally:
        report(waiting=None)


def moved_out_of_the_way(descriptor: int) -> int:
    """Duplicate a descriptor under a high number that child processes do not inherit."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY)
    except OSError:  # the limit on open files is lower
        os.set_inheritable(descriptor, False)
        return descriptor
    os.close(descriptor)
    return moved


def _take_as_sent(number: int, frame: FrameType | None) -> None:
    """Give a signal that the supervisor passed on outside a run its usual effect."""
    signal.raise_signal(as_sent(number))


def _notice_debuggers(event: str, arguments: tuple[object, ...]) -> None:
    if event in DEBUGGERS:
        report(debugging=True)
