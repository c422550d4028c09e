"""Processes left behind by a run that died: the supervisor adopts and ends them."""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli.processes import prctl_of_kernel

if TYPE_CHECKING:
    import psutil

PR_SET_CHILD_SUBREAPER = 36
LEAVE_WITHIN = 2.0
"""Seconds to clean up for processes that notice the end of the run themselves."""
END_WITHIN = 10.0
LONGEST_COMMAND = 60


def adopt_orphans() -> list[psutil.Process]:
    """Make every descendant whose parent dies from now on our child, where the system can (Linux).
    Returns the children that we already have: those of the shell that became this process, as in
    `tensorboard & exec rlcli train`."""
    prctl = prctl_of_kernel()
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return _children()


def _children() -> list[psutil.Process]:
    try:
        if hasattr(os, "waitid"):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    import psutil

    return psutil.Process().children()


def lasting_orphans(others: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The remaining children, but `others`, that do not end by themselves."""
    orphans = [process for process in _children() if process not in others]
    if not orphans:
        return []
    import psutil

    _, left = psutil.wait_procs(orphans, timeout=LEAVE_WITHIN)
    return list(left)


def reap_orphans(child: int) -> None:
    """Reap orphans that have ended, as init would; the child itself is left to whoever waits for
    it."""
    if not hasattr(os, "waitid"):  # nor were any adopted
        return
    # no child is left if passing on a signal has found that the child had ended
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child:
                return
            os.waitpid(ended.si_pid, 0)


def end_orphans(others: Sequence[psutil.Process]) -> None:
    """End all remaining descendants, once the child is gone,
    except `others` that were there before it."""
    patience, end = LEAVE_WITHIN, time.monotonic() + END_WITHIN
    while time.monotonic() < end:
        orphans = [process for process in _children() if process not in others]
        if not orphans:
            return
        import psutil

        _, left = psutil.wait_procs(orphans, timeout=patience)
        for orphan in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
        patience = 0.1  # the next round gets those whose parents were just killed


def name_of(process: psutil.Process) -> str:
    """Its command line, shortened, and its number."""
    import psutil

    try:
        command = " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        command = "a process"
    return f"{textwrap.shorten(command, LONGEST_COMMAND)} ({process.pid})"
