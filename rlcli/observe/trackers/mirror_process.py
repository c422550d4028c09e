"""The process that mirrors a run while it runs: `python -m … RUN TRACKER SECONDS`.

Its stdin is a pipe from the run: when that says anything, or closes because the run has died, the
mirror writes the last lines and ends, within so many seconds. It writes to stdout, one word or
sentence per line:

    busy             it hands something to the tracker
    idle             the tracker has taken it
    failed: …        it gives up, for this reason

It exits with 0 once the tracker has everything. What the tracker's library prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlcli.disk_errors import free_bytes
from rlcli.errors import RlcliError
from rlcli.observe.trackers.mirror import LEAST_FREE, Mirror
from rlcli.processes import STOP_SIGNALS, keep_private

LOOK_SECONDS = 1.0
"""Seconds between two looks at the files."""
LONGEST_REASON = 300
NICENESS = 10
"""A tenth of the share that a process of the run has of a busy core."""


def main(folder: str, name: str, seconds: str) -> int:
    messages = os.dup(1)
    os.dup2(2, 1)

    def say(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the run was killed
            os.write(messages, f"{text}\n".encode(errors="replace"))

    is_over = threading.Event()
    ending = threading.Thread(target=_await_end, args=(is_over, float(seconds)), daemon=True)
    ending.start()
    try:
        _mirror(Path(folder), name, is_over, say)
    except BaseException as error:  # a library may even call sys.exit
        say(f"failed: {_reason(error)}")
        raise
    return 0


def _mirror(folder: Path, name: str, is_over: threading.Event, say: Callable[[str], None]) -> None:
    mirror = Mirror(folder, name, say=say)
    while not mirror.acquire():  # the mirror of an earlier process of the run is about to end
        time.sleep(LOOK_SECONDS)
    mirror.open()
    while not is_over.wait(LOOK_SECONDS):
        mirror.catch_up()
    mirror.close()


def _await_end(is_over: threading.Event, seconds: float) -> None:
    """Wait for the end of the run. The kernel ends this process if the tracker then takes too long,
    whatever it does."""
    os.read(0, 1)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    is_over.set()


def _reason(error: BaseException) -> str:
    lines = (error.what if isinstance(error, RlcliError) else str(error)).split("\n")
    text = next((line.strip() for line in lines if line.strip()), type(error).__name__)
    return text[:LONGEST_REASON]


def _stay_out_of_the_way(folder: Path) -> None:
    """Give way to others on the processor, leave some of the disk to them, and end with the run
    instead of by its signals."""
    keep_private()
    os.nice(NICENESS)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if (free := free_bytes(folder)) is not None:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        room = max(0, free - LEAST_FREE)
        room = room if most == resource.RLIM_INFINITY else min(room, most)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))


if __name__ == "__main__":
    _stay_out_of_the_way(Path(sys.argv[1]))
    sys.exit(main(*sys.argv[1:]))
