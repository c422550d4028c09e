"""Guardian between a run and a server: its arguments are the server's command,
its stdin is a pipe from the run.

It adopts whatever the server leaves behind. Once the server has ended, or the run has closed the
pipe for any reason, it ends everything that is left and exits as the server did. It imports nothing
from rlcli, to stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_EVERY = 0.1
"""Seconds between two checks of the server."""


def main() -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    while server.poll() is None:
        closed, _, _ = select.select([0], [], [], LOOK_EVERY)
        if closed and not os.read(0, 1):
            server.kill()
            server.wait()
    end_all()
    return server.returncode


def end_all() -> None:
    """Kill the children until none are left: those of a process that dies become ours."""
    while left := children():
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def children() -> list[int]:
    return [
        int(number)
        for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ]


if __name__ == "__main__":
    code = main()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL's handler cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
