"""Private files: mode 0600 in 0700 folders, replaced atomically, never through a link. And files
that others made: read only if they are regular files, and up to a limit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlcli.errors import ResourceError

FILE_MODE = 0o600
FOLDER_MODE = 0o700

MAX_OBJECT = 64 << 20
"""Maximum bytes of a JSON file that describes something."""


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
LFS_FETCH = "fetch it with `git lfs pull` in its repository, or with `hf download`"
"""The hint for a file that is only a pointer."""


def open_regular(path: Path | str, flags: int = 0) -> int:
    """A descriptor for reading a regular file. Raises OSError, also for a pipe,
    a device or a folder.

    Those are refused before they are opened: opening a pipe waits for a writer, opening a device
    may do anything.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced meanwhile
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return descriptor


def read_regular(path: Path | str, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError,
    also for one that is larger."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most else file.read(most + 1)
    if max(size, len(content)) > most:
        raise OSError(
            errno.EFBIG,
            f"{size / 2**20:,.0f} MiB, more than the {most / 2**20:,.0f} MiB allowed",
            str(path),
        )
    return content


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has not fetched the file: a clone without it has a short text instead."""
    try:
        return read_regular(path, 1024).startswith(LFS_POINTER)
    except OSError:
        return False


def read_text(path: Path | str, most: int = MAX_OBJECT) -> str:
    """The text of a regular file; bytes that are not UTF-8 are marked. Raises OSError as
    `read_regular` does."""
    return read_regular(path, most).decode("utf-8", errors="replace")


def read_object(path: Path | str, most: int = MAX_OBJECT) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError as `read_regular` does,
    ValueError for any other content."""
    try:
        value = json.loads(read_regular(path, most))
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def known_object(path: Path | str, most: int = MAX_OBJECT) -> dict[str, Any]:
    """Like `read_object`, but empty if the file is missing, torn or something else."""
    try:
        return read_object(path, most)
    except (OSError, ValueError):
        return {}


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, each for the owner alone;
    existing ones stay as they are."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=FOLDER_MODE)


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file created with mode 0600; anything else in its place is refused, such as
    a symbolic link or a pipe, which would wait for a reader. Raises OSError."""
    descriptor = os.open(
        path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return descriptor


def private_file(path: Path, flags: int) -> int:
    """Like `open_private`, for writing. Raises ResourceError F75 if the user must make the place
    writable."""
    try:
        return open_private(path, os.O_WRONLY | flags)
    except OSError as error:
        raise not_writable(path, error, "remove it, or choose another folder") from None


def not_writable(path: Path, error: OSError, hint: str | None = None) -> ResourceError:
    """The error F75 for a place that the user must make writable, or choose another."""
    return ResourceError(
        f"not writable: {error.strerror or error}", where=str(path), hint=hint, code="F75"
    )


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file so that a reader, or a crash, sees either all of the old content or all of the
    new, which may come in parts."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        descriptor = open_private(temporary, os.O_WRONLY | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Raises OSError if `replace_file` cannot write this file; leaves it as it is."""
    if path.exists() and not path.is_file():
        number = errno.EISDIR if path.is_dir() else errno.EINVAL
        message = "it is a folder" if path.is_dir() else "not an ordinary file"
        raise OSError(number, message, str(path))
    probe = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    os.close(open_private(probe, os.O_WRONLY | os.O_EXCL))
    probe.unlink()


def sync_folder(folder: Path) -> None:
    """Sync a folder: files created, renamed or removed in it are then on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
