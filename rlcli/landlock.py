"""Lets a process write no files any more, by Landlock, which needs no privileges: Linux 5.13, or
6.2 for all of it."""

from __future__ import annotations

import ctypes
import os
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, on every processor."""
ASK_VERSION, PATH_RULE, PR_SET_NO_NEW_PRIVS = 1, 1, 38
WRITE_FILE = 1 << 1
CHANGES = {1: WRITE_FILE | 0x1FF0, 2: 1 << 13, 3: 1 << 14}
"""Version → the rights to change files that it handles: write, remove and create;
move; truncate."""
WRITABLE = "/dev/null"

_libc = ctypes.CDLL(None, use_errno=True)


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def file_write_gap() -> str:
    """What a process can still do to files on this machine after `refuse_writes`;
    empty: nothing."""
    version = _version()
    if version >= max(CHANGES):
        return ""
    return "be truncated" if version else "be emptied, removed and created"


def refuse_writes() -> None:
    """From now on this process and all that it starts open no file for writing, and create, remove
    and truncate none, as far as the kernel can refuse it. Descriptors that are open stay so.
    Raises OSError."""
    version = _version()
    if not version:
        return
    handled = ctypes.c_uint64(sum(rights for since, rights in CHANGES.items() if since <= version))
    ruleset = _call(
        CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(ctypes.sizeof(handled)), 0
    )
    device = os.open(WRITABLE, os.O_PATH | os.O_CLOEXEC)
    try:
        _call(ADD_RULE, ruleset, PATH_RULE, ctypes.byref(_PathRule(WRITE_FILE, device)), 0)
        if _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl: new privileges cannot be given up")
        _call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(device)
        os.close(ruleset)


def _version() -> int:
    """The kernel's version of Landlock; 0: none, or switched off."""
    # elsewhere the numbers mean other calls
    if sys.platform != "linux" or not hasattr(_libc, "syscall"):
        return 0
    return max(_libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION), 0)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return result
