"""The folder in which the processes of a run meet: it holds the master's sockets,
or says where they are.

The master removes it at the end. It holds a lock on a file in it, which the kernel releases however
the master dies. By that lock, never by the name alone, the next run recognises an abandoned folder
and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlcli.errors import ResourceError
from rlcli.files import open_private
from rlcli.runtime.control import SOCKET

PREFIX = "rlcli-"
LOCK = "owner.lock"
LONGEST_ADDRESS = 107
"""Maximum length of the path of a Unix socket on Linux, in bytes."""


class MeetingFolder:
    """A fresh folder that only this user may enter, with a path short enough for a socket in it."""

    def __init__(self) -> None:
        """Raises ResourceError F75 if none can be created."""
        self.path = _make_folder()
        self._lock = _hold(self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Remove the folders of dead masters: those of this user,
    with a lock that nobody holds any more."""
    for parent in _places():
        for folder in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError), _lock_of_a_dead_master(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _places() -> Iterator[Path]:
    """Places for such a folder: the user's TMPDIR, or a shorter path."""
    yield from dict.fromkeys(Path(parent) for parent in (tempfile.gettempdir(), "/tmp", "/dev/shm"))


def _make_folder() -> Path:
    failures = []
    for parent in _places():
        if len(os.fsencode(parent / f"{PREFIX}xxxxxxxx" / SOCKET)) > LONGEST_ADDRESS:
            failures.append(f"{parent}: its path is too long for a socket")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            failures.append(f"{parent}: {error.strerror or error}")
    message = f"cannot make a private folder for the processes of the run ({'; '.join(failures)})"
    raise ResourceError(
        message, hint="set TMPDIR to a short path that you may write to", code="F75"
    )


def _hold(folder: Path) -> int:
    """Take the lock before the file gets its name, so that nobody finds it unlocked."""
    unnamed = folder / f".{LOCK}"
    descriptor = open_private(unnamed, os.O_RDWR | os.O_EXCL)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(unnamed, folder / LOCK)
    return descriptor


@contextlib.contextmanager
def _lock_of_a_dead_master(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError if it belongs to another user, has no lock,
    or the lock is held."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(folder)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
