"""What a process has started: which processes, how much memory they hold, and their end.

Only the standard library is imported here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Container, Sequence
from contextlib import suppress

PAGE = os.sysconf("SC_PAGE_SIZE")
PR_SET_CHILD_SUBREAPER = 36
BUFFER = 212_992
"""Bytes that the kernel keeps for an open descriptor at most: the default of a socket;
a pipe's are fewer."""


def is_visible() -> bool:
    """Whether this kernel lists the children of a process."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def adopt_orphans() -> None:
    """From now on whatever descends from this process stays its descendant, also when its own
    parent ends: on Linux."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants_of(pid: int, spared: Container[int] = ()) -> list[int]:
    """The descendants of a process, except `spared` and their descendants."""
    family = [pid]
    for parent in family:  # it grows
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = map(int, _text(f"/proc/{parent}/task/{thread}/children").split())
                family += (child for child in children if child not in spared)
    return family[1:]


def end_descendants_of(pid: int, spared: Container[int] = ()) -> None:
    """Kill them, also those that start meanwhile. All are found if `pid` adopts orphans."""
    while running := [child for child in descendants_of(pid, spared) if not _has_ended(child)]:
        for descendant in running:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGKILL)
        time.sleep(0.001)
    for descendant in descendants_of(pid, spared):
        with suppress(ChildProcessError):  # it is not this process's child
            os.waitpid(descendant, os.WNOHANG)


def memory_held(pids: Sequence[int], limit: int) -> int:
    """Bytes of memory that processes hold together, with what the kernel may keep for their
    descriptors; exact only if it may be above the limit.

    Memory that several share counts once, but telling what is shared takes a thousand times as
    long.
    """
    buffers = BUFFER * sum(_descriptors(pid) for pid in pids)
    simple = buffers + sum(_resident(pid) for pid in pids)
    if simple <= limit:
        return simple
    # While processes end, what they shared counts more and more for those that are measured later.
    return buffers + min(sum(_proportional(pid) for pid in pids) for _ in range(3))


def _descriptors(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _resident(pid: int) -> int:
    with suppress(OSError):
        return int(_text(f"/proc/{pid}/statm").split()[1]) * PAGE
    return 0


def _proportional(pid: int) -> int:
    """Resident memory with each shared page divided by the number of those that share it."""
    try:
        lines = _text(f"/proc/{pid}/smaps_rollup").splitlines()
    except OSError:
        return _resident(pid)
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _has_ended(pid: int) -> bool:
    """Whether it is gone, or only its exit code is left."""
    try:
        return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _text(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
