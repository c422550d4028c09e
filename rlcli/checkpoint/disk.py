"""The disk that holds the checkpoints: opening, syncing, swapping and removing, free space, and
what its errors mean."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcli.errors import ResourceError
from rlcli.files import make_folder, open_regular

FAULTS = {
    errno.ENOSPC: "F28",
    errno.EFBIG: "F28",
    errno.EDQUOT: "F76",
    errno.EIO: "F29",
    errno.EROFS: "F75",
    errno.EACCES: "F75",
    errno.EPERM: "F75",
    errno.ESTALE: "F27",
}
"""errno → id of the fault."""
OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust, such as safetensors, pass on the system's error."""
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
    free = _free(folder)
    if free is not None and free < needed:
        message = f"{subject} needs {_size(needed)}, {_size(free)} are free"
        raise ResourceError(message, where=str(folder), hint=hint, code="F28")


def disk_failure(error: BaseException, folder: Path) -> ResourceError | None:
    """The disk error at a place, with the id of the fault; None if it was not the disk."""
    if isinstance(error, ResourceError):
        return error
    written = OS_ERROR.search(str(error))
    if not isinstance(error, OSError) and written is None:
        return None
    number = error.errno if isinstance(error, OSError) else int(written[1]) if written else None
    message = os.strerror(number) if number else str(error)
    if number in (errno.ENOSPC, errno.EDQUOT):
        message += f", {_size(_free(folder) or 0)} free on the disk"
    where = getattr(error, "filename", None) or folder
    return ResourceError(
        message, where=str(where), hint=_hint(number), code=FAULTS.get(number or 0)
    )


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the disk into ResourceError with the place and the id of the fault; leave
    others unchanged."""
    try:
        yield
    except Exception as error:  # a library may raise its own exception for the system's error
        failure = disk_failure(error, folder)
        if failure is None or failure is error:
            raise
        raise failure from error


def _hint(number: int | None) -> str | None:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "make room; checkpoint.keep_last says how many stay"
    if number == errno.EFBIG:
        return "files may not grow so large here: ulimit -f"
    return (
        "choose a folder that can be written"
        if number in (errno.EROFS, errno.EACCES, errno.EPERM)
        else None
    )


def _free(folder: Path) -> int | None:
    """Bytes that are free where a folder is or will be; None if unknown."""
    existing = next(
        (parent for parent in (folder, *folder.absolute().parents) if parent.exists()), None
    )
    try:
        return shutil.disk_usage(existing).free if existing else None
    except OSError:
        return None


def _size(number: int) -> str:
    """Bytes in words: small runs need so little that it would be 0 MiB."""
    return f"{number / 2**20:,.0f} MiB" if number >= 10 << 20 else f"{number / 2**10:,.0f} KiB"
