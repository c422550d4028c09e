"""Runs programs written by a model where they can do no harm: no network, none of your files, no
other processes.

A program sees Python, the system's libraries and an empty folder. Linux namespaces hide everything
else from it. The kernel bounds what each of its processes uses; the memory of all of them is
measured many times per second, and a filter of system calls refuses memory that belongs to none.
Only the standard library is imported here.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NoReturn

from . import _process_tree, _syscall_filter
from ._confinement import NOBODY, WORK, Limits, become_confined, become_limited

ALARMS = {signal.SIGALRM, signal.SIGPROF}
UNFINISHED = -1
"""Exit status of a program that had to be killed."""
_CHECK_S = 0.01
"""Seconds between two measurements of the memory of a program's processes."""


class NoSandbox(OSError):
    """The machine does not allow sandboxing."""


def unbounded() -> str:
    """What a program may hold or reach on this machine in spite of its limits; empty: nothing."""
    gaps = []
    if not _syscall_filter.is_available():
        gaps.append(
            "shared memory, memory files and keys, as this machine has no filter of "
            "system calls (seccomp)"
        )
    if not _process_tree.is_visible():
        gaps.append(
            "memory in several processes, as this kernel does not list the children of a process"
        )
    return "; ".join(gaps)


@dataclass(frozen=True)
class Ended:
    """Result of a finished program."""

    output: bytes
    status: int
    """Its exit code, 128 + the signal that killed it, or UNFINISHED."""
    why: str = ""
    """The limit that stopped it."""


@dataclass(frozen=True)
class Pipe:
    """Both ends of a pipe."""

    reading: FileIO
    writing: FileIO


@contextmanager
def pipe() -> Iterator[Pipe]:
    """A pipe whose ends are closed afterwards, unless they have been closed before."""
    with _later_alarms():
        reading, writing = os.pipe()
        ends = Pipe(FileIO(reading, "rb"), FileIO(writing, "wb"))
    with ends.reading, ends.writing:
        yield ends


@contextmanager
def memory_file(content: bytes) -> Iterator[FileIO]:
    """A file in memory alone with this content, open at its beginning."""
    with _later_alarms():
        file = FileIO(os.memfd_create("content"), "r+b")
    with file:
        file.write(content)
        file.seek(0)
        yield file


class Program:
    """A program that runs from `start` to the end of the block of which it is the context.
    `descriptors`: its open files, number → ours, without gaps; it has no others."""

    def __init__(
        self,
        arguments: Sequence[str],
        files: Mapping[str, str],
        descriptors: Mapping[int, int],
        limits: Limits,
        confined: bool = True,
    ):
        """`arguments`: for Python. `files`: name → text, in the program's folder."""
        self.limits = limits
        self.pid = 0
        self.folder: str | None = None
        self._arguments = arguments
        self._files = files
        self._descriptors = descriptors
        self._confined = confined
        self._deadline = math.inf

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """Raises NoSandbox."""
        self._deadline = time.monotonic() + self.limits.wall_s
        with pipe() as problems, pipe() as mapped, pipe() as unshared:
            with _later_alarms():
                self.folder = None if self._confined else tempfile.mkdtemp(prefix="rlcli-program-")
                self.pid = os.fork()
                if self.pid == 0:
                    self._run_in_child(problems, mapped, unshared)
            for inherited in (problems.writing, mapped.reading, unshared.writing):
                inherited.close()
            if self._confined and unshared.reading.read(1) and os.geteuid() == 0:
                for kind in ("uid_map", "gid_map"):
                    Path(f"/proc/{self.pid}/{kind}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            unshared.reading.close()
            with suppress(BrokenPipeError):
                mapped.writing.write(b"m")
            mapped.writing.close()
            problem = problems.reading.read().decode()
        if problem:
            raise NoSandbox(problem)

    def _run_in_child(self, problems: Pipe, mapped: Pipe, unshared: Pipe) -> NoReturn:
        ends = unshared.writing.fileno(), mapped.reading.fileno(), problems.writing.fileno()
        become = become_confined if self._confined else become_limited
        try:
            problems.reading.close()
            folder = self.folder or WORK
            become(self._arguments, self._files, self._descriptors, self.limits, folder, ends)
        except BaseException as problem:
            problems.writing.write(f"{type(problem).__name__}: {problem}".encode()[:500])
        finally:
            os._exit(125)

    def wait(self, output: int, partner: Program | None = None) -> Ended:
        """Read everything it writes to a descriptor until it finishes,
        or it or its partner exceeds a limit."""
        received, is_open, status, why = bytearray(), True, UNFINISHED, ""
        while status == UNFINISHED and not why:
            if not is_open:  # it may still run
                time.sleep(0.001)
            elif select.select([output], [], [], _CHECK_S)[0]:
                piece = os.read(output, 1 << 16)
                received += piece
                is_open = bool(piece)
            status = UNFINISHED if is_open else self._status()
            why = self._exceeded(len(received)) or (partner._exceeded(0) if partner else "")
        self.end()
        if status in (128 + signal.SIGXCPU, 128 + signal.SIGKILL):
            why = f"used up {self.limits.cpu_s} s of processor time"
        return Ended(bytes(received), status, why)

    def _exceeded(self, received: int) -> str:
        """The limit that it has exceeded, if any."""
        if received > self.limits.output_bytes:
            return f"wrote more than {self.limits.output_bytes} bytes"
        if self.pid and time.monotonic() >= self._deadline:
            return f"ran for {self.limits.wall_s:g} s"
        most = self.limits.memory_bytes
        if self.pid and _process_tree.memory_held(self._processes(), most) > most:
            return f"held more than {most >> 20} MiB of memory"
        return ""

    def _processes(self) -> list[int]:
        """The program's processes. In namespaces, the first process there is ours,
        and shares its memory with us."""
        return _process_tree.descendants_of(self.pid)[0 if self.folder else 1 :]

    def _status(self) -> int:
        """How it ended; UNFINISHED if it still runs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done:
            return UNFINISHED
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """Kill it with everything it has started, and remove its files."""
        with _later_alarms():
            if self.pid:
                _process_tree.end_descendants_of(self.pid)
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.pid = 0
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _later_alarms() -> Iterator[None]:
    """Alarms take effect afterwards: a time limit raises an exception wherever its alarm arrives,
    so a process that has just started would be forgotten. They are not blocked, as they would then
    arrive in another thread; handlers run in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in ALARMS}
    try:
        for alarm in handlers:
            signal.signal(alarm, lambda number, _: arrived.append(number))
        yield
    finally:
        for alarm, handler in handlers.items():
            signal.signal(alarm, handler)
    for number in arrived:
        signal.raise_signal(number)
