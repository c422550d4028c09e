"""A supervised run's line to its supervisor: JSON facts that say where it is, so that its end can be told from outside.

    {"run": "/…/runs/ppo_math/20260412-093011", "warm_start": false, "max_restarts": 0}
                                                                        it works in this folder from now on
    {"begun": true}                                                     all that was asked for is written down there
    {"waiting": "actor_train", "limit": 3600}                           a call that may take so many seconds began
    {"waiting": null}                                                   and ended
    {"debugging": true}                                                 someone is at a breakpoint: deadlines are off
    {"run": "/…", "over": true}                                         the run that it is to resume needs nothing more
    {"verdict": 0}                                                      it has said how it ended; the exit code follows

Without a supervisor nothing is said and nobody listens.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlcli.launch.stopping import heeded, passed_on
from rlcli.processes import die_with_parent

VARIABLE = "RLCLI_SUPERVISOR"
"""Descriptor of the line, descriptor for stacks, process id of the supervisor."""
SHOW_STACKS = signal.SIGRTMIN
"""Makes a supervised process write where each of its threads is."""
DEBUGGERS = ("builtins.breakpoint", "pdb.Pdb")
"""Audit events by which someone who debugs is noticed. A hook of breakpoint() would be a frame in their way."""

OUT_OF_THE_WAY = 128
"""The line's descriptor is at least this: no component closes or writes to it that means the first few."""

_line: int | None = None
_process: int | None = None
"""Who speaks over the line. A copy that a component forks keeps silent."""


def attach() -> bool:
    """Whether we are supervised; if so, tie this process to its supervisor's life, signals and questions."""
    global _line, _process
    told = os.environ.pop(VARIABLE, None)
    if told is None:
        return False
    line, stacks, supervisor = (int(number) for number in told.split(":"))
    die_with_parent()
    if os.getppid() != supervisor:
        os._exit(1)  # it was gone before we asked
    line, stacks = (_moved_out_of_the_way(descriptor) for descriptor in (line, stacks))
    _line, _process = line, os.getpid()
    faulthandler.enable(stacks)
    faulthandler.register(SHOW_STACKS, stacks, all_threads=True)
    for number in heeded():
        signal.signal(passed_on(number), _take_as_sent)
    sys.addaudithook(_notice_debuggers)
    return True


def report(**facts: Any) -> None:
    """Say something to the supervisor, if there is one. A line that a component has closed is no reason to end."""
    if _line is not None and os.getpid() == _process:
        with contextlib.suppress(OSError):
            os.write(_line, (json.dumps(facts) + "\n").encode())


@contextmanager
def waiting(what: str, limit: float) -> Iterator[None]:
    """A call that may take `limit` seconds; the supervisor ends us if it takes longer."""
    report(waiting=what, limit=limit)
    try:
        yield
    finally:
        report(waiting=None)


def _moved_out_of_the_way(descriptor: int) -> int:
    """The same file under a high number, which a child process does not inherit."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY)
    except OSError:  # the limit on open files is lower
        os.set_inheritable(descriptor, False)
        return descriptor
    os.close(descriptor)
    return moved


def _take_as_sent(number: int, frame: FrameType | None) -> None:
    """Outside of a run a signal that is passed on does what it does by itself."""
    signal.raise_signal(number - signal.SIGRTMIN)


def _notice_debuggers(event: str, arguments: tuple[object, ...]) -> None:
    if event in DEBUGGERS:
        report(debugging=True)
