"""What a run started and left behind when it died: it becomes ours, and is ended."""

from __future__ import annotations

import os
import time

PR_SET_CHILD_SUBREAPER = 36
LEAVE_WITHIN = 2.0
"""Seconds in which what notices by itself that the run is gone may clear up after itself."""
END_WITHIN = 10.0


def adopt_orphans() -> None:
    """From now on a process whose parent dies, anywhere below us, becomes our child."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(child: int) -> None:
    """Let those go that have ended, as init would; the child itself is left to whoever waits for it."""
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ended.si_pid == child:
            return
        os.waitpid(ended.si_pid, 0)


def end_orphans() -> None:
    """End all that is left below us, once the child is gone."""
    import psutil

    patience, end = LEAVE_WITHIN, time.monotonic() + END_WITHIN
    while (orphans := psutil.Process().children()) and time.monotonic() < end:
        _, left = psutil.wait_procs(orphans, timeout=patience)
        for one in left:
            one.kill()
        patience = 0.1  # whose parents were killed just now come next
