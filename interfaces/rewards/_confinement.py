"""What a forked process does to become a program of a sandbox: it leaves the machine behind,
accepts limits, and executes Python.

Only the standard library is imported here.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
_MOST_FILES = 64
_MOST_SIGNALS = 256
KERNEL_SETTINGS = {
    "kernel/shmall": 0,
    "kernel/shmmni": 0,
    "kernel/msgmni": 0,
    "fs/mqueue/queues_max": 0,
    "user/max_user_namespaces": 0,
}
"""Settings of a program's own namespaces, for kernels without a filter of system calls."""


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


def become_limited(
    arguments: Sequence[str],
    files: Mapping[str, str],
    descriptors: Mapping[int, int],
    limits: Limits,
    folder: str,
    pipes: tuple[int, int, int],
) -> NoReturn:
    """Become the program without namespaces, under a process that ends what it leaves behind; other
    processes are in reach. Returns never; raises OSError if the system refuses a step."""
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


def become_confined(
    arguments: Sequence[str],
    files: Mapping[str, str],
    descriptors: Mapping[int, int],
    limits: Limits,
    folder: str,
    pipes: tuple[int, int, int],
) -> NoReturn:
    """Become the program in its own namespaces, under a process that kills them when the program or
    the parent ends. Returns never; raises OSError if the system refuses a step.

    `pipes`: written to once the namespaces exist, read from until the parent has set their users,
    and closed by the start of the program.
    """
    unshare_done, mapped, report = pipes
    is_root = os.geteuid() == 0
    os.setsid()
    _enter_namespaces(unshare_done, mapped)
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
        _become_nobody()
    _become(arguments, descriptors, limits, folder, report)


def _enter_namespaces(unshare_done: int, mapped: int) -> None:
    """A plain user maps itself; for root, the parent does, before it writes to `mapped`."""
    user, group = os.geteuid(), os.getegid()
    spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID
    _call("unshare", spaces)
    os.write(unshare_done, b"u")
    os.close(unshare_done)
    os.read(mapped, 1)
    if user == 0:
        return
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text)


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _become(
    arguments: Sequence[str],
    descriptors: Mapping[int, int],
    limits: Limits,
    folder: str,
    report: int,
) -> NoReturn:
    os.chdir(folder)
    # out of the way of the numbers that they get below, which may be those of others now
    files = {
        number: fcntl.fcntl(ours, fcntl.F_DUPFD, _MOST_FILES)
        for number, ours in descriptors.items()
    }
    report = fcntl.fcntl(report, fcntl.F_DUPFD, _MOST_FILES)
    _set_resource_limits(limits)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _default_signals()
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


def _set_resource_limits(limits: Limits) -> None:
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


def _default_signals() -> None:
    """Signals that the run ignores must work in a program."""
    for number in range(1, signal.NSIG):
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)


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
    """Move to an in-memory file system with VISIBLE, read-only, and a folder to work in."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    links = {path: os.readlink(path) for path in VISIBLE if os.path.islink(path)}
    options = f"size={2 * limits.file_bytes + (1 << 20)},nr_inodes=4096,mode=0755"
    _mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path in (*VISIBLE, *DEVICES):
        target = f"{ROOT}{path}"
        if path in links:
            os.symlink(links[path], target)
        elif not os.path.lexists(target) and os.path.exists(path):
            _show(path, target)
    os.makedirs(f"{ROOT}{WORK}")
    os.chmod(f"{ROOT}{WORK}", 0o777)
    _leave_old_root()


def _leave_old_root() -> None:
    os.mkdir(f"{ROOT}/.old")
    _call("pivot_root", ROOT.encode(), f"{ROOT}/.old".encode())
    os.chdir("/")
    _call("umount2", b"/.old", MNT_DETACH)
    os.rmdir("/.old")


def _show(path: str, target: str) -> None:
    """Mount a path of the machine at `target`."""
    if os.path.isdir(path):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(path, target, None, MS_BIND | MS_REC)
    if path not in DEVICES:
        _make_read_only(target)


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
