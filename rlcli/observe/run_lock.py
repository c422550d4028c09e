"""One run per folder: an exclusive flock that the kernel frees when its owner dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from rlcli.errors import ResourceError
from rlcli.files import open_private

log = logging.getLogger(__name__)

NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class RunLock:
    """Held from `acquire` to `release` or the end of the process. The file stays: unlinking it would race."""

    def __init__(self, descriptor: int):
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, path: Path) -> RunLock:
        """Take the lock at once and write who holds it; ResourceError F71 names a holder that lives."""
        descriptor = open_private(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read_holder(descriptor)
            os.close(descriptor)
            hint = "wait for it, stop it, or choose another --run-dir"
            what = f"{path.parent} is in use by {owner}"
            raise ResourceError(what, where=str(path), hint=hint, code="F71") from None
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                os.close(descriptor)
                raise
            log.warning("%s: no locks on this file system; see to it that no other run uses it", path.parent)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": datetime.now(UTC).isoformat()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
        return cls(descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a component may have closed it
                os.close(self._descriptor)
            self._descriptor = None


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"pid {int(holder['pid'])} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
