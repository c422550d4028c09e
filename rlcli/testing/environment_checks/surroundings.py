"""What an environment does to its surroundings while it is played: connections, files, and settings
of the whole process, which are put back."""

from __future__ import annotations

import locale
import os
import random
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from rlcli.testing.process_state import ProcessState

IMPORTING = "<frozen importlib._bootstrap>"
"""The file of the code that loads modules."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CONNECTING = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.sendmsg": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
}
"""Audit event → which of its arguments is an address or a host."""
CHANGING_FILES = {
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.utime": 1,
    "os.rename": 2,
    "os.link": 2,
    "os.symlink": 2,
}
"""Audit event → how many paths it begins with."""

SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "locale": (partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "default time-out of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "state of random": (random.getstate, random.setstate),
}
"""Settings of the process in addition to `ProcessState`: how each is read and put back."""
HANDLERS = {
    f"handler of {number.name}": (partial(signal.getsignal, number), partial(signal.signal, number))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1)
}
"""Likewise of signals, which only the main thread may put back."""


@dataclass
class Conduct:
    """What happened while an environment was played."""

    scratch: str
    """The folder for its temporary files."""
    has_network: bool
    connections: list[str] = field(default_factory=list)
    """Hosts; none was reached unless `has_network`."""
    writes: list[str] = field(default_factory=list)
    """Paths outside of `scratch`."""
    changes: list[str] = field(default_factory=list)
    """Settings of the process, in words."""

    def connects(self, address: Any) -> None:
        """Note a connection, and refuse it with PermissionError unless it is local."""
        host = address[0] if isinstance(address, tuple) else address
        name = os.fsdecode(host) if isinstance(host, str | bytes) else ""
        if name in ("", "localhost", "::1") or name.startswith(("127.", "/", "\0")):
            return
        self.connections.append(name)
        if not self.has_network:
            raise PermissionError("environments are tested without a network")

    def writes_to(self, path: Any) -> None:
        """Note a file that is changed, unless it is the environment's, Python's or the kernel's."""
        if not isinstance(path, str | bytes | os.PathLike):
            return
        absolute = os.path.realpath(os.fsdecode(path))
        is_allowed = absolute.startswith(("/dev/null", "/proc/")) or "__pycache__" in absolute
        if not is_allowed and not Path(absolute).is_relative_to(self.scratch):
            self.writes.append(absolute)


_watching: list[Conduct] = []
"""Of the environment that is being played, if any."""


@contextmanager
def watched(conduct: Conduct) -> Iterator[None]:
    """Note what this process does. Nothing but local sockets can be used unless `has_network`;
    temporary files are made in `scratch`; settings are put back at the end."""
    _listen()
    original, outside = tempfile.tempdir, ProcessState.now()
    tempfile.tempdir = os.environ["TMPDIR"] = conduct.scratch
    state, settings = ProcessState.now(), _settings()
    _watching.append(conduct)
    try:
        yield
    finally:
        _watching.pop()
        if changes := ProcessState.now().changes_since(state):
            conduct.changes.append(changes)
        conduct.changes += [
            name for name, value in _settings().items() if settings.get(name, value) != value
        ]
        _put_back(settings)
        outside.restore()
        tempfile.tempdir = original


@cache
def _listen() -> None:
    """Hear audit events from now on: a hook cannot be removed."""
    sys.addaudithook(_hear)


def _hear(event: str, arguments: Sequence[Any]) -> None:
    if not _watching:
        return
    conduct = _watching[-1]
    if event in CONNECTING:
        conduct.connects(arguments[CONNECTING[event]])
    elif (paths := _written(event, arguments)) and not _is_importing():
        for path in paths:
            conduct.writes_to(path)


def _written(event: str, arguments: Sequence[Any]) -> Sequence[Any]:
    """The paths that an event writes to."""
    if event == "open" and arguments[2] & WRITING:
        return arguments[:1]
    if event in CHANGING_FILES and not _is_in_open_folder(arguments):
        return arguments[: CHANGING_FILES[event]]
    return ()


def _is_importing() -> bool:
    """Whether a module is being loaded. What a library writes then, such as matplotlib the folder
    of its settings, depends on what has been loaded before, and is not the episode's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False


def _is_in_open_folder(arguments: Sequence[Any]) -> bool:
    """Whether the path is relative to a descriptor, as in `shutil.rmtree`."""
    return isinstance(arguments[-1], int) and arguments[-1] >= 0


def _settings() -> dict[str, Any]:
    """Those of the process, and the random state of numpy, which is compared only."""
    settings = {name: read() for name, (read, _) in (HANDLERS | SETTINGS).items()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        settings["state of numpy.random"] = str(numpy.get_state())
    return settings


def _put_back(settings: dict[str, Any]) -> None:
    is_main = threading.current_thread() is threading.main_thread()
    for name, (_, put_back) in (SETTINGS | (HANDLERS if is_main else {})).items():
        put_back(settings[name])
