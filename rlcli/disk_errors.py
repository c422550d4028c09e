"""What the errors of a disk mean, and how much of it is free."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcli.errors import ResourceError

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
        message += f", {in_words(free_bytes(folder) or 0)} free on the disk"
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


def free_bytes(folder: Path) -> int | None:
    """Bytes that are free where a folder is or will be; None if unknown."""
    existing = next(
        (parent for parent in (folder, *folder.absolute().parents) if parent.exists()), None
    )
    try:
        return shutil.disk_usage(existing).free if existing else None
    except OSError:
        return None


def in_words(number: int) -> str:
    """Bytes in words: small runs need so little that it would be 0 MiB."""
    return f"{number / 2**20:,.0f} MiB" if number >= 10 << 20 else f"{number / 2**10:,.0f} KiB"
