"""One run per folder: an exclusive flock that the kernel frees when its owner dies,
however it dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcli.errors import ResourceError
from rlcli.files import known_object, open_private
from rlcli.processes import ProcessRecord

log = logging.getLogger(__name__)

NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
LARGEST = 4096
"""Maximum size of the file, in bytes."""


@dataclass(frozen=True)
class Holder:
    """The last process that had a run. Whether it still runs is determined from its processes."""

    owner: ProcessRecord
    """The process in which the run's master runs."""
    supervisor: ProcessRecord | None = None
    """The process that watches the owner, if there is one."""

    @property
    def processes(self) -> tuple[ProcessRecord, ...]:
        """The processes to ask for a stop, the preferred one first."""
        return (self.supervisor, self.owner) if self.supervisor is not None else (self.owner,)

    def is_alive(self) -> bool:
        """Whether one of them is alive; processes of another machine count as not alive."""
        return any(process.is_alive() for process in self.processes)


class RunLock:
    """Held from `acquire` to `release` or the end of the process. The file stays:
    unlinking it would race."""

    def __init__(self, descriptor: int):
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, path: Path) -> RunLock:
        """Take the lock without waiting. Raises ResourceError F71, which names a live holder."""
        descriptor = open_private(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            holder = read_holder(path)
            owner = (
                f"pid {holder.owner.pid} on {holder.owner.host}"
                if holder is not None
                else "another process"
            )
            hint = "wait for it, stop it, or choose another --run-dir"
            message = f"{path.parent} is in use by {owner}"
            raise ResourceError(message, where=str(path), hint=hint, code="F71") from None
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                os.close(descriptor)
                raise
            log.warning(
                "%s: no locks on this file system; make sure that no other run uses it", path.parent
            )
        return cls(descriptor)

    def record_holder(self, supervisor: ProcessRecord | None = None) -> None:
        """Record that this process has the run, watched by `supervisor`. Whoever only looks whether
        the lock is free leaves the record of the last one. Raises OSError."""
        assert self._descriptor is not None
        holder = Holder(ProcessRecord.of_this_process(), supervisor)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(holder)).encode() + b"\n", 0)

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a component may have closed it
                os.close(self._descriptor)
            self._descriptor = None


def read_holder(path: Path) -> Holder | None:
    """The holder recorded in a lock file; None if it cannot be read."""
    recorded = known_object(path, LARGEST)
    owner = process_record(recorded.get("owner"))
    return Holder(owner, process_record(recorded.get("supervisor"))) if owner is not None else None


def process_record(recorded: Any) -> ProcessRecord | None:
    """The process that a file describes; None if it could not be found again."""
    if not isinstance(recorded, dict):
        return None
    host, pid, started = recorded.get("host"), recorded.get("pid"), recorded.get("started")
    if not (isinstance(host, str) and isinstance(pid, int) and isinstance(started, str | float)):
        return None
    return ProcessRecord(host, pid, str(started)) if 1 < pid < 1 << 31 else None
