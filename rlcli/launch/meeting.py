"""The folder in which the processes of a run meet: it holds the master's sockets,
or says where they are. The master owns it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlcli import owned_folder
from rlcli.errors import ResourceError
from rlcli.messaging.control import SOCKET
from rlcli.owned_folder import PREFIX, OwnedFolder

LONGEST_ADDRESS = 107
"""Maximum length of the path of a Unix socket on Linux, in bytes."""


def meeting_folder() -> OwnedFolder:
    """A fresh folder with a path short enough for a socket in it.
    Raises ResourceError F75 if none can be created."""
    failures = []
    for parent in _parents():
        if len(os.fsencode(parent / f"{PREFIX}xxxxxxxx" / SOCKET)) > LONGEST_ADDRESS:
            failures.append(f"{parent}: its path is too long for a socket")
            continue
        try:
            return OwnedFolder(parent)
        except OSError as error:
            failures.append(f"{parent}: {error.strerror or error}")
    message = f"cannot make a private folder for the processes of the run ({'; '.join(failures)})"
    raise ResourceError(
        message, hint="set TMPDIR to a short path that you may write to", code="F75"
    )


def remove_abandoned() -> None:
    """Remove what dead masters left."""
    for parent in _parents():
        owned_folder.remove_abandoned(parent)


def _parents() -> Iterator[Path]:
    """Where such a folder may be: in the user's TMPDIR, or below a shorter path."""
    yield from dict.fromkeys(Path(parent) for parent in (tempfile.gettempdir(), "/tmp", "/dev/shm"))
