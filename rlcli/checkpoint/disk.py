"""The disk that holds the checkpoints: opening, swapping and removing, and free space."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
import uuid
from pathlib import Path

from rlcli.disk_errors import explain_disk_errors, free_bytes, in_words
from rlcli.errors import ResourceError
from rlcli.files import make_folder, open_regular

CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)
TRIES = 5
"""Attempts to open a file that a network file system reports as stale (ESTALE)."""


def open_to_read(path: Path) -> int:
    """A descriptor of a regular file. Raises OSError if it is missing, a link,
    a pipe or a device."""
    for tries in range(1, TRIES + 1):
        try:
            return open_regular(path, os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ESTALE or tries == TRIES:
                raise
            time.sleep(0.1 * tries)
    raise AssertionError("the last try returns or raises")


def files_under(folder: Path) -> dict[str, Path]:
    """Relative path, with `/`, → everything that is not a folder; links are not followed."""
    entries = {}
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in (*names, *links):
            path = Path(parent, name)
            entries[path.relative_to(folder).as_posix()] = path
    return entries


def exchange(first: Path, second: Path) -> bool:
    """Swap two folders atomically; False if the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    if renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first))


def discard(path: Path) -> None:
    """Remove a file, a link or a whole folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_writable(checkpoints: Path) -> None:
    """Raise ResourceError F75 if nothing can be written to the folder;
    it is created if it does not exist."""
    probe = checkpoints / f".writable-{uuid.uuid4().hex}"
    with explain_disk_errors(checkpoints):
        make_folder(checkpoints)
        probe.mkdir()
        probe.rmdir()


NO_CHECKPOINTS = (
    "make room, or set checkpoint.every_seconds=null checkpoint.at_end=false "
    "checkpoint.on_stop=false"
)


def check_free_space(
    folder: Path, needed: int, subject: str = "a checkpoint", hint: str = NO_CHECKPOINTS
) -> None:
    """Raise ResourceError F28 if `needed` bytes do not fit on the disk where a folder is or will
    be."""
    free = free_bytes(folder)
    if free is not None and free < needed:
        message = f"{subject} needs {in_words(needed)}, {in_words(free)} are free"
        raise ResourceError(message, where=str(folder), hint=hint, code="F28")
