"""Files for their owner alone: mode 0600 in 0700 folders, replaced in one piece, never through a link."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, each for the owner alone; those that exist stay as they are."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=FOLDER_MODE)


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file that is made with mode 0600; a symbolic link in its place is refused."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, meets either all of the old content or all of the new."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        descriptor = open_private(temporary, os.O_WRONLY | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
