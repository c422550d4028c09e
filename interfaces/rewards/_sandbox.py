"""Runs programs written by a model where they can do no harm: no network, none of your files, no
other processes.

A program sees Python, the system's libraries and an empty folder. Linux namespaces hide everything
else from it. The kernel bounds what each of its processes uses; the memory of all of them is
measured many times per second, and a filter of system calls refuses memory that belongs to none.
Only the standard library is imported here.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import resource
import select
import shutil
import signal
import sys
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

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
SYS_MOUNT_SETATTR = 442
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
KEYCTL_JOIN_SESSION_KEYRING = 1
NOBODY = 65534

PYTHON = os.path.realpath(sys.executable)
VISIBLE = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/nix/store",
    sys.base_prefix,
)
"""The part of the machine's file system visible to a program, read-only."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
ROOT = "/proc"
"""Where the program's file system is assembled: a folder that always exists,
and that no program may see."""
WORK = "/work"
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
ALARMS = {signal.SIGALRM, signal.SIGPROF}
UNFINISHED = -1
"""Exit status of a program that had to be killed."""
_MOST_FILES = 64
_MOST_SIGNALS = 256
_CHECK_S = 0.01
"""Seconds between two measurements of the memory of a program's processes."""
KERNEL_SETTINGS = {
    "kernel/shmall": 0,
    "kernel/shmmni": 0,
    "kernel/msgmni": 0,
    "fs/mqueue/queues_max": 0,
    "user/max_user_namespaces": 0,
}
"""Settings of a program's own namespaces, for kernels without a filter of system calls."""


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
class Limits:
    """Limits of one program and everything it starts."""

    cpu_s: int
    wall_s: float
    memory_bytes: int
    """Memory of all its processes together, and address space of each."""
    file_bytes: int
    output_bytes: int
    processes: int


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
    reading, writing = os.pipe()
    with FileIO(reading, "rb") as reading_end, FileIO(writing, "wb") as writing_end:
        yield Pipe(reading_end, writing_end)


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
        run = _confined if self._confined else _limited
        try:
            problems.reading.close()
            folder = self.folder or WORK
            run(self._arguments, self._files, self._descriptors, self.limits, folder, ends)
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


# -- in the child: each function ends in the program or raises -------------------------------------


def _limited(
    arguments: Sequence[str],
    files: Mapping[str, str],
    descriptors: Mapping[int, int],
    limits: Limits,
    folder: str,
    pipes: tuple[int, int, int],
) -> None:
    """Without namespaces, under a process that ends what the program leaves behind;
    other processes are in reach."""
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _process_tree.adopt_orphans()
    _write(files, folder)
    program = os.fork()
    if program:
        os.closerange(0, 1 << 16)
        status = _wait_for(program)
        _process_tree.end_descendants_of(os.getpid())
        os._exit(status)
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _become(arguments, descriptors, limits, folder, pipes[2])


def _confined(
    arguments: Sequence[str],
    files: Mapping[str, str],
    descriptors: Mapping[int, int],
    limits: Limits,
    folder: str,
    pipes: tuple[int, int, int],
) -> None:
    """In its own namespaces, under a process that kills them when the program or the parent
    ends."""
    unshare_done, mapped, report = pipes
    is_root, user, group = os.geteuid() == 0, os.geteuid(), os.getegid()
    os.setsid()
    spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID
    _call("unshare", spaces)
    os.write(unshare_done, b"u")
    os.close(unshare_done)
    os.read(mapped, 1)
    if not is_root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _set_kernel_limits()
    _make_root(limits)
    _write(files, folder)
    alive, lifeline = os.pipe()
    first = os.fork()  # the first process of the new PID namespace: all others die with it
    if first:
        _close_all_but(lifeline)
        os._exit(_wait_for(first))
    os.close(lifeline)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:  # the parent had already exited
        os._exit(125)
    program = os.fork()
    if program:
        _close_all_but(alive)
        os._exit(_wait_for(program))
    os.setsid()  # a signal to its group reaches nothing else
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _become(arguments, descriptors, limits, folder, report)


def _become(
    arguments: Sequence[str],
    descriptors: Mapping[int, int],
    limits: Limits,
    folder: str,
    report: int,
) -> None:
    os.chdir(folder)
    # out of the way of the numbers that they get below, which may be those of others now
    files = {
        number: fcntl.fcntl(ours, fcntl.F_DUPFD, _MOST_FILES)
        for number, ours in descriptors.items()
    }
    report = fcntl.fcntl(report, fcntl.F_DUPFD, _MOST_FILES)
    bounds = {
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + 1),
        resource.RLIMIT_AS: (limits.memory_bytes,) * 2,
        resource.RLIMIT_FSIZE: (limits.file_bytes,) * 2,
        resource.RLIMIT_NPROC: (limits.processes,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (_MOST_FILES,) * 2,
        resource.RLIMIT_SIGPENDING: (_MOST_SIGNALS,) * 2,
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        soft_bound, hard_bound = (
            limit if hard == resource.RLIM_INFINITY else min(limit, hard) for limit in bound
        )
        resource.setrlimit(kind, (soft_bound, hard_bound))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for number in range(1, signal.NSIG):  # signals that the run ignores must work in a program
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    os.dup2(report, _MOST_FILES - 1, inheritable=False)
    for number, descriptor in files.items():
        os.dup2(descriptor, number)
    os.closerange(max(descriptors) + 1, _MOST_FILES - 1)
    os.closerange(_MOST_FILES, 1 << 16)
    _leave_keyring()
    if _syscall_filter.is_available():
        _syscall_filter.install()
    os.execve(
        PYTHON, [PYTHON, "-S", "-s", *arguments], {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
    )


def _set_kernel_limits() -> None:
    for name, value in KERNEL_SETTINGS.items():
        with suppress(OSError):  # older kernels do not let a namespace's owner change it
            Path(f"/proc/sys/{name}").write_text(str(value))


def _leave_keyring() -> None:
    """Join a new session keyring, where there are any: the user's may hold secrets."""
    number = SYS_KEYCTL.get(os.uname().machine)
    if number is not None:
        _libc.syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None)


def _make_root(limits: Limits) -> None:
    """An in-memory file system with VISIBLE, read-only, and a folder to work in;
    the old root is detached."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    links = {path: os.readlink(path) for path in VISIBLE if os.path.islink(path)}
    options = f"size={2 * limits.file_bytes + (1 << 20)},nr_inodes=4096,mode=0755"
    _mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path in (*VISIBLE, *DEVICES):
        target = f"{ROOT}{path}"
        if path in links:
            os.symlink(links[path], target)
        elif not os.path.lexists(target) and os.path.exists(path):
            if os.path.isdir(path):
                os.makedirs(target)
            else:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                Path(target).touch()
            _mount(path, target, None, MS_BIND | MS_REC)
            if path not in DEVICES:
                _make_read_only(target)
    os.makedirs(f"{ROOT}{WORK}")
    os.chmod(f"{ROOT}{WORK}", 0o777)
    os.mkdir(f"{ROOT}/.old")
    _call("pivot_root", ROOT.encode(), f"{ROOT}/.old".encode())
    os.chdir("/")
    _call("umount2", b"/.old", MNT_DETACH)
    os.rmdir("/.old")


def _make_read_only(target: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(
        MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0
    )
    size = ctypes.sizeof(attributes)
    if _libc.syscall(
        SYS_MOUNT_SETATTR,
        AT_FDCWD,
        target.encode(),
        AT_RECURSIVE,
        attributes,
        ctypes.c_size_t(size),
    ):
        raise OSError(
            ctypes.get_errno(), f"mount_setattr: {os.strerror(ctypes.get_errno())}", target
        )


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [
        text.encode() if text is not None else None for text in (source, target, kind, options)
    ]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _write(files: Mapping[str, str], folder: str) -> None:
    for name, text in files.items():
        Path(folder, name).write_text(text, encoding="utf-8", errors="surrogatepass")
        os.chmod(Path(folder, name), 0o644)


def _close_all_but(descriptor: int) -> None:
    os.closerange(0, descriptor)
    os.closerange(descriptor + 1, 1 << 16)


def _wait_for(pid: int) -> int:
    """The exit code of one child, while reaping others."""
    while True:
        done, status = os.wait()
        if done == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
