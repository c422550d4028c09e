"""Mirrors one run to one tracker, without gaps and without duplicates.

What was mirrored is recorded in the run's folder, `trackers/<tracker>.json`: when a mirror begins
and when it ends, never in between. A mirror that follows one that has ended properly continues
after it, if the files still begin with what was mirrored. In any other case (a run that repeats
steps after its last checkpoint, a mirror that was killed between two writes) nobody can say what
the tracker has, so it gets everything anew, in a new entry.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlcli.disk_errors import free_bytes, in_words
from rlcli.errors import ResourceError
from rlcli.failpoints import failpoint
from rlcli.files import known_object, make_folder, open_private, replace_file
from rlcli.observe.run_overview import read_overview
from rlcli.observe.trackers.contract import Tracker, Update, make_tracker
from rlcli.observe.trackers.description import describe_run
from rlcli.observe.trackers.redaction import Redactor
from rlcli.observe.trackers.run_files import Rewound, RunFiles

LEAST_FREE = 128 << 20
"""Bytes of the disk that a mirror leaves to the run."""


@dataclass(frozen=True)
class MirrorRecord:
    """The content of `trackers/<tracker>.json`."""

    entry: str
    """What the tracker calls the run."""
    positions: dict[str, tuple[int, str]]
    """File → what was read of it."""
    is_closed: bool
    """Whether the tracker has all of that, and nothing else."""

    def write(self, file: Path) -> None:
        document = {"entry": self.entry, "read": self.positions, "closed": self.is_closed}
        replace_file(file, (json.dumps(document, indent=2) + "\n").encode())

    @classmethod
    def read(cls, file: Path) -> MirrorRecord | None:
        """None if there is none that can be read."""
        document = known_object(file)
        try:
            positions = {
                str(name): (int(size), str(digest))
                for name, (size, digest) in document["read"].items()
            }
            return cls(str(document["entry"]), positions, document["closed"] is True)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


class Mirror:
    """Mirrors a run to a tracker. While one does, no other one can."""

    def __init__(
        self,
        folder: Path,
        name: str,
        tracker: Tracker | None = None,
        say: Callable[[str], None] = lambda word: None,
    ):
        """`tracker`: by default the one of that name; `say`: is called with `busy` and `idle`
        around each use of it. Raises ResourceError F72 if the folder is not that of a run,
        ImportError."""
        self.redactor = Redactor(os.environ)
        self.run = describe_run(folder, self.redactor)
        self.last_step: int | None = None
        """The last step that was written here."""
        self._tracker = tracker or make_tracker(name)
        self._say = say
        self._file = self.run.folder / "trackers" / f"{name}.json"
        self._files = RunFiles(self.run.folder, self.redactor)
        self._entry: str | None = None
        make_folder(self._file.parent)
        self._lock = open_private(self._file.with_suffix(".lock"), os.O_RDWR)

    def acquire(self) -> bool:
        """Whether no other process mirrors the run to this tracker; none can from now on."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def open(self) -> None:
        """Continue where the last mirror ended, or begin anew. Raises whatever the tracker does."""
        self._say("busy")
        record = MirrorRecord.read(self._file)
        if record is not None and not self._continue(record):
            self._tracker.discard(self.run, record.entry)
        self._entry = self._tracker.open(self.run, self._entry)
        self._write_record(is_closed=False)
        self._say("idle")

    def catch_up(self) -> None:
        """Write everything that the run has written. Raises whatever the tracker does, and
        ResourceError F28 if it would leave the run too little of the disk."""
        try:
            while updates := self._files.new_updates():
                self._write(updates)
        except Rewound:
            assert self._entry is not None
            self._say("busy")
            self._begin_anew()
            self._tracker.close("failed", None)
            self._tracker.discard(self.run, self._entry)
            self._entry = self._tracker.open(self.run, None)
            self._write_record(is_closed=False)
            self._say("idle")
            self.catch_up()

    def close(self) -> str:
        """Write the last lines and the curve, and let others mirror the run. Returns what the
        tracker calls the run. Raises whatever the tracker does."""
        self.catch_up()
        self._say("busy")
        curve = self.run.folder / "curve.png"
        overview = read_overview(self.run.folder)
        state = overview.state if overview is not None else "unknown"
        self._tracker.close(state, curve if curve.is_file() else None)
        self._write_record(is_closed=True)
        self._files.close()
        os.close(self._lock)
        assert self._entry is not None
        return self._entry

    def _continue(self, record: MirrorRecord) -> bool:
        """Continue after what is recorded; False if that is not possible."""
        if not record.is_closed or not self._tracker.continues(self.run, record.entry):
            return False
        try:
            self._files.skip(record.positions)
        except (Rewound, OSError, KeyError):
            self._begin_anew()
            return False
        self._entry = record.entry
        return True

    def _begin_anew(self) -> None:
        self._files.close()
        self._files = RunFiles(self.run.folder, self.redactor)

    def _write(self, updates: list[Update]) -> None:
        free = free_bytes(self.run.folder)
        if free is not None and free < LEAST_FREE:
            message = f"{in_words(free)} are free on the disk, which are left to the run"
            raise ResourceError(message, where=str(self.run.folder), code="F28")
        self._say("busy")
        failpoint("tracker.write")
        self._tracker.write(updates)
        self._say("idle")
        self.last_step = updates[-1].step

    def _write_record(self, *, is_closed: bool) -> None:
        assert self._entry is not None
        MirrorRecord(self._entry, self._files.positions, is_closed).write(self._file)
