"""Python imports this when it starts, if the folder is on PYTHONPATH:
it removes features specific to Linux.

The remaining features exist on macOS too, as far as Linux can show that. Libraries with a separate
implementation for each system, such as psutil, still see /proc.
"""

import builtins
import ctypes
import io
import os
import resource
import signal
import sys

LIBRARIES = ("psutil", "torch", "numpy", "multiprocessing", "joblib")
for module, names in {
    os: (
        "memfd_create",
        "pidfd_open",
        "sched_getaffinity",
        "sched_setaffinity",
        "waitid",
        "pipe2",
        "eventfd",
    ),
    signal: ("SIGRTMIN", "SIGRTMAX", "pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


class _WithoutLinux(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "renameat2", "syscall"):
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


def _is_hidden(path):
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith("/proc"):
        return False
    caller = sys._getframe(2)
    while caller is not None and caller.f_globals.get("__name__", "").split(".")[0] in (
        "pathlib",
        "io",
        "os",
    ):
        caller = caller.f_back
    return (
        caller is not None and caller.f_globals.get("__name__", "").split(".")[0] not in LIBRARIES
    )


def _without_proc(function):
    def refuse(path=None, *arguments, **named):
        if _is_hidden(path):
            raise FileNotFoundError(2, os.strerror(2), path)
        return (
            function(path, *arguments, **named)
            if path is not None
            else function(*arguments, **named)
        )

    return refuse


def _setrlimit(kind, limits, set_limit=resource.setrlimit):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    set_limit(kind, limits)


ctypes.CDLL = _WithoutLinux
builtins.open = io.open = _without_proc(builtins.open)
os.listdir, os.stat, os.open = (
    _without_proc(os.listdir),
    _without_proc(os.stat),
    _without_proc(os.open),
)
resource.setrlimit = _setrlimit
