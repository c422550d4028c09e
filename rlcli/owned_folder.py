"""A temporary folder of one process, which is removed however that process ends.

The process removes it itself if it can. It holds a lock on a file in the folder, which the kernel
releases however the process dies. By that lock, never by the name alone, whoever makes the next
folder in the same place recognises an abandoned one and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlcli.files import open_private

PREFIX = "rlcli-"
LOCK = "owner.lock"
"""Name of the locked file, which holds the name of the owner's machine: a shared file system may
keep locks for each machine alone, so only the owner's machine can tell that it is dead."""
LONGEST_NAME = 256


class OwnedFolder:
    """A fresh folder in `parent` that only this user may enter."""

    def __init__(self, parent: Path, name: str = ""):
        """`name` is a part of its own name. Raises OSError if it cannot be created."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}", dir=parent))
        self._lock: int | None = _hold(self.path)

    def close(self) -> None:
        """Remove it; a second time does nothing."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """A fresh folder next to other temporary ones, from which those of dead processes are removed
    first; `name` is a part of its own name. Raises OSError if it cannot be created."""
    parent = Path(tempfile.gettempdir())
    remove_abandoned(parent)
    with contextlib.closing(OwnedFolder(parent, name)) as folder:
        yield folder.path


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of dead processes: those of this user and this machine, with a lock that
    nobody holds any more."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _lock_of_a_dead_owner(folder):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, its lock last: without it nobody would recognise the rest, such as the
    weights of a model, if this is interrupted."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
    shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path) -> int:
    """Take the lock before the file gets its name, so that nobody finds it unlocked."""
    unnamed = folder / f".{LOCK}"
    descriptor = open_private(unnamed, os.O_RDWR | os.O_EXCL)
    with contextlib.suppress(OSError):  # a file system without locks: it stays if its owner dies
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, os.fsencode(platform.node()))
    os.rename(unnamed, folder / LOCK)
    return descriptor


@contextlib.contextmanager
def _lock_of_a_dead_owner(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError if it belongs to another user or machine, has no
    lock, or the lock is held."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(folder)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.read(descriptor, LONGEST_NAME) != os.fsencode(platform.node()):
            raise PermissionError(folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
