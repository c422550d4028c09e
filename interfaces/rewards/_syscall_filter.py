"""Refuses system calls by which a program could hold memory or reach things that no other limit
covers.

A process's memory limit counts its address space. Shared memory segments, memory files, queues,
rings and file systems of its own are outside of it; keys and sockets of the machine are outside of
namespaces. The filter stays for everything that the process starts.
Only the standard library is imported here.
"""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Sequence
from dataclasses import dataclass

_libc = ctypes.CDLL(None, use_errno=True)

PR_GET_SECCOMP, PR_SET_SECCOMP = 21, 22
SECCOMP_MODE_FILTER = 2
PR_SET_NO_NEW_PRIVS = 38
LOAD, JUMP_IF_EQUAL, JUMP_IF_GREATER, JUMP_IF_ANY, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
"""Codes of the kernel's filter language: of its words, conditions and results."""
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Offsets of the fields in the kernel's description of a system call; arguments are 8 bytes each,
the low half first."""
NEWEST = 462
"""The last system call considered here. Later ones are reported as missing,
as by an older kernel."""


@dataclass(frozen=True)
class ProcessorArchitecture:
    audit_number: int
    index: int
    """Position of this architecture's number among the numbers of a system call."""


ARCHITECTURES = {
    "x86_64": ProcessorArchitecture(0xC000003E, 0),
    "aarch64": ProcessorArchitecture(0xC00000B7, 1),
}

REFUSED = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
}
"""System call → its numbers, in the order of ARCHITECTURES."""
SIGNALLING = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
}
"""System calls that send a signal to a process, or prepare that; it is their first argument."""
ONLY_ON_X86_64 = {"inotify_init": 253}
CLONE, CLONE3, SOCKET, SETSOCKOPT, FCNTL = (56, 220), (435, 435), (41, 198), (54, 208), (72, 25)
NEW_NAMESPACES = 0x7E020000
AF_UNIX, SO_SNDBUF, F_SETPIPE_SZ = 1, 7, 1031

Step = tuple[int, int, int, int]
"""A step of a filter: code, steps to skip if true, and if false, a number."""


class _Step(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("number", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step)))


def is_available() -> bool:
    """Whether this machine's kernel and processor have such filters."""
    return platform.machine() in ARCHITECTURES and _libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def install() -> None:
    """Filter the system calls of this process, which must have given up new privileges.
    Raises OSError."""
    _install(filter_steps(ARCHITECTURES[platform.machine()]))


def refuse_signals(targets: Sequence[int]) -> None:
    """From now on this process and all that it starts send no signals to these processes, and to
    these groups, which are negative. Only where such filters are available. Raises OSError."""
    if not is_available():
        return
    if _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl: new privileges cannot be given up")
    _install(signal_steps(ARCHITECTURES[platform.machine()], targets))


def _install(steps: Sequence[Step]) -> None:
    filled = (_Step * len(steps))(*(_Step(*step) for step in steps))
    if (
        _libc.prctl(
            PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(_Filter(len(steps), filled)), 0, 0
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), "prctl: a filter of system calls was refused")


def filter_steps(machine: ProcessorArchitecture) -> list[Step]:
    """The filter as a program; calls of another architecture, which have other numbers,
    are refused."""
    architecture = machine.index
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_IF_EQUAL, 1, 0, machine.audit_number),
        _refusal(errno.EPERM),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_IF_GREATER, 0, 1, NEWEST),
        _refusal(errno.ENOSYS),
    ]
    numbers = [numbers[architecture] for numbers in REFUSED.values()]
    for number in (*numbers, *(ONLY_ON_X86_64.values() if architecture == 0 else ())):
        steps += [(JUMP_IF_EQUAL, 0, 1, number), _refusal(errno.EPERM)]
    # libraries then use clone
    steps += [(JUMP_IF_EQUAL, 0, 1, CLONE3[architecture]), _refusal(errno.ENOSYS)]
    steps += _refused_if(CLONE[architecture], 0, (JUMP_IF_ANY, 0, 1, NEW_NAMESPACES), errno.EPERM)
    steps += _refused_if(
        SOCKET[architecture], 0, (JUMP_IF_EQUAL, 1, 0, AF_UNIX), errno.EAFNOSUPPORT
    )
    steps += _refused_if(SETSOCKOPT[architecture], 2, (JUMP_IF_EQUAL, 0, 1, SO_SNDBUF), errno.EPERM)
    steps += _refused_if(FCNTL[architecture], 1, (JUMP_IF_EQUAL, 0, 1, F_SETPIPE_SZ), errno.EPERM)
    return [*steps, (RETURN, 0, 0, ALLOW)]


def signal_steps(machine: ProcessorArchitecture, targets: Sequence[int]) -> list[Step]:
    """A filter that refuses signals to these processes and groups, also by a handle."""
    tests: list[Step] = []
    for target in targets:
        tests += [(JUMP_IF_EQUAL, 0, 1, target & 0xFFFFFFFF), _refusal(errno.EPERM)]
    steps: list[Step] = [(LOAD, 0, 0, NUMBER_AT)]
    for numbers in SIGNALLING.values():
        beyond = (JUMP_IF_EQUAL, 0, len(tests) + 2, numbers[machine.index])
        steps += [beyond, (LOAD, 0, 0, ARGUMENTS_AT), *tests, (RETURN, 0, 0, ALLOW)]
    return [*steps, (RETURN, 0, 0, ALLOW)]


def _refused_if(number: int, argument: int, condition: Step, error: int) -> Sequence[Step]:
    """Steps that refuse a system call by one of its arguments:
    `condition` skips a step if the call is allowed."""
    load = (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)
    return [(JUMP_IF_EQUAL, 0, 4, number), load, condition, _refusal(error), (RETURN, 0, 0, ALLOW)]


def _refusal(error: int) -> Step:
    return RETURN, 0, 0, ERRNO | error
