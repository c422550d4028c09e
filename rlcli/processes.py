"""Processes that end with the one that started them, and processes that are isolated from it.

An isolated process works on external input that may hang it or break it, such as a chat template or
a model's output. The parent calls `start_isolated`; the child calls `isolate` before it looks at
any input. `OwnPauses` are times in which a process was stopped; a
`ProcessClock` counts the time that others leave to a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.landlock import file_write_gap as file_write_gap
from rlcli.landlock import refuse_writes

if TYPE_CHECKING:
    from subprocess import Popen

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to stop; a scheduler may send them to every process of a job."""

PR_SET_PDEATHSIG = 1
LOOK_FOR_PARENT = 0.5
"""Seconds between two checks for the parent, where the system does not report its end."""
isolated: set[int] = set()
"""Numbers of the isolated processes that this one has started, which end with it."""
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")
"""Environment variables that an isolated process sees: no tokens, no keys."""


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file with an id of this start of the machine."""
START_FIELD = 19
"""Position of a process's start, in ticks since the machine's, among the fields of its `stat` that
follow its name."""

PAUSE = 5.0
"""Seconds between two clock checks that mean this process was paused, or busy with a slow disk."""
LOOK_AT_QUEUE = 0.2
"""Seconds between two looks at the times for which the threads of other processes waited."""


@dataclass(frozen=True)
class ProcessRecord:
    """A process of some machine. The start time distinguishes it from a later one with the same
    number."""

    host: str
    pid: int
    started: str
    """As `start_time` gives it."""

    @classmethod
    def of_this_process(cls) -> ProcessRecord:
        """The record of this process."""
        return cls(socket.gethostname(), os.getpid(), start_time(os.getpid()) or "")

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Whether it still runs; a process of another machine counts as not running, because
        nothing is known of it."""
        return self.is_here and start_time(self.pid) == self.started

    def send(self, number: int) -> bool:
        """Send it a signal, and never to another process. Returns whether it was alive. Raises
        PermissionError."""
        if not hasattr(os, "pidfd_open"):
            return self._send_by_number(number)
        try:
            # from now on the number cannot become another process's
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def _send_by_number(self, number: int) -> bool:
        """Where a process has no handle, its number could be given to another one right after the
        check."""
        if not self.is_alive():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def keep_private() -> None:
    """From now on the files of this process and its children are their owner's alone, and none
    leaves a core: both may hold what nobody else may see."""
    import resource

    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def start_time(pid: int) -> str | None:
    """When a process began, in a form that is only to be compared; None if there is none, or only
    its exit code is left."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return _ticks_since_boot(pid) or str(process.create_time())
    return None


def _ticks_since_boot(pid: int) -> str | None:
    """When a process began, by Linux's own count: seconds since the epoch would change whenever
    somebody sets the clock. None on other systems."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{BOOT_ID.read_text().strip()} {int(fields[START_FIELD])}"
    return None


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command that starts `rlcli <arguments>` the way this process was started."""
    return [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1], *arguments]


def die_with_parent() -> None:
    """Be killed once the parent is gone. It may be gone already: compare `os.getppid()` afterwards.

    Linux does this itself. Elsewhere a thread of this process looks for the parent,
    which ends with an `exec`.
    """
    prctl = prctl_of_kernel()
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(
            target=_die_after, args=(os.getppid(),), name="parent", daemon=True
        ).start()


def _die_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_FOR_PARENT)
    os.kill(os.getpid(), signal.SIGKILL)


def prctl_of_kernel() -> Callable[..., int] | None:
    """Linux's `prctl`; None on other systems."""
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)


def allowed_cores() -> int:
    """The processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ended_how(code: int, out_of_memory: bool | None = None) -> str:
    """An exit code in words, to follow the name of a process."""
    if code >= 0:
        return f"ended with exit code {code}"
    guess = {True: " (out of memory)", False: "", None: " (out of memory?)"}[out_of_memory]
    return f"was killed by {signal.Signals(-code).name}{guess if -code == signal.SIGKILL else ''}"


def start_isolated(command: Sequence[str], **variables: str) -> Popen[bytes]:
    """Start a command that reads tasks from stdin and writes replies to stdout,
    as the leader of a process group."""
    import subprocess

    inherited = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    fixed = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=inherited | fixed | variables,
        cwd="/",
        process_group=0,  # so that everything it has started can be ended with it
    )
    isolated.add(process.pid)
    return process


def isolate(parent: int, memory_bytes: int, file_bytes: int = 0) -> None:
    """From now on this process writes no files (or none larger than `file_bytes`), uses at most
    `memory_bytes` of memory and ends with its parent. `file_write_gap` says what the kernel cannot
    refuse.

    A signal that asks the run to stop does not affect it: the run needs its replies to finish the
    step. SIGPROF ends it immediately, even if Python never gets to handle it, so
    `signal.setitimer(ITIMER_PROF, …)` is a hard limit on CPU time.
    """
    import resource

    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(memory_bytes)
    if not file_bytes:
        refuse_writes()
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(0)


def limit_memory(size: int) -> None:
    """From now on this process uses at most `size` bytes of memory."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
    with contextlib.suppress(ValueError):  # macOS limits no address space
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def seconds_in_queue(pid: int | None = None) -> float:
    """For how long the main thread of a process, or of this one, has been ready to compute while
    others did; 0 where the system does not say."""
    return _in_queue(Path(f"/proc/{pid or os.getpid()}"))


def _in_queue(entry: Path) -> float:
    """The same of a process or thread by its entry in /proc."""
    try:
        _, waited, _ = (entry / "schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(waited) / 1e9


class OwnPauses:
    """Detects times in which this process itself did not run, such as after Ctrl-Z: no deadline of
    another process counts them. For a loop that checks the clock more often than every PAUSE
    seconds."""

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def since_last_look(self) -> float:
        """Seconds since the last check if that was a pause, else 0."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        return passed if passed >= PAUSE else 0.0


class ProcessClock:
    """Counts the time that processes have for their work: neither seconds in which one of their
    threads was ready to compute while others did, nor times in which this process itself did not
    run. For a loop that reads it more often than every PAUSE seconds."""

    def __init__(self, pids: Iterable[int]):
        self._pids = tuple(pids)
        self._seconds = 0.0
        self._looked = time.monotonic()
        self._queued = self._seconds_in_queue()

    def seconds(self) -> float:
        """The seconds since it was made that count."""
        passed = time.monotonic() - self._looked
        if passed < LOOK_AT_QUEUE:
            return self._seconds
        before, self._queued = self._queued, self._seconds_in_queue()
        self._looked += passed
        if passed < PAUSE:
            # processes that wait for each other are all as slow as the one that waits for a core
            queued = (waited - before.get(thread, 0.0) for thread, waited in self._queued.items())
            self._seconds += max(0.0, passed - max(queued, default=0.0))
        return self._seconds

    def _seconds_in_queue(self) -> dict[Path, float]:
        """By thread."""
        threads: list[Path] = []
        for pid in self._pids:
            with contextlib.suppress(OSError):  # it has ended
                threads += Path(f"/proc/{pid}/task").iterdir()
        return {thread: _in_queue(thread) for thread in threads}
