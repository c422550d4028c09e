"""What a run adds to metrics.jsonl and samples.jsonl, while it runs or afterwards."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from itertools import compress, count
from pathlib import Path
from typing import Any, BinaryIO

from rlcli.files import open_regular
from rlcli.observe.metrics import with_nonfinite
from rlcli.observe.samples import SampleRecord
from rlcli.observe.trackers.contract import Update
from rlcli.observe.trackers.redaction import Redactor

AT_ONCE = 4 << 20
"""Bytes of a file that are read at a time, unless a single step has more."""
BLOCK = 1 << 20

Position = tuple[int, str]
"""Bytes of a file that were read, and their SHA-256."""
Record = dict[str, Any]


class Rewound(Exception):
    """A file no longer begins with what was read: the run was resumed from an earlier step."""


@dataclass
class NewLines:
    """Whole lines that a file has and that were not read yet, in order."""

    lines: list[tuple[bytes, Record | None]] = field(default_factory=list)
    """Each with its record; None if it has none with a step."""
    last_step: float = math.inf
    """All lines up to this step are here; later ones are read another time."""


class GrowingFile:
    """The whole lines of a file, each once."""

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO | None = None
        """The file that was read last; as long as it is open, no other one gets its number."""
        self._read = 0
        self._digest = hashlib.sha256()

    @property
    def position(self) -> Position:
        """What was read until now."""
        return self._read, self._digest.hexdigest()

    def skip(self, position: Position) -> None:
        """Continue after what an earlier process has read. Raises Rewound."""
        size, digest = position
        if size:
            self._reopen(size, digest)

    def new_lines(self) -> NewLines:
        """The lines that follow, as many as are read at a time. Raises Rewound."""
        try:
            is_other = self._file is None or not os.path.samestat(
                os.stat(self.path), os.fstat(self._file.fileno())
            )
            if is_other or self._size() < self._read:
                self._reopen(*self.position)
        except FileNotFoundError:
            if self._read:
                raise Rewound from None
            return NewLines()
        assert self._file is not None
        self._file.seek(self._read)
        new, read, step = NewLines(), 0, 0
        while (line := self._file.readline()).endswith(b"\n"):
            record = _record(line)
            if record is not None and record["step"] > step:
                if read >= AT_ONCE:
                    new.last_step = step
                    break
                step = record["step"]
            new.lines.append((line, record))
            read += len(line)
        return new

    def take(self, new: NewLines, last_step: float) -> list[Record]:
        """Read the first new lines, up to a step. Returns their records."""
        is_after = (record is not None and record["step"] > last_step for _, record in new.lines)
        taken = new.lines[: next(compress(count(), is_after), None)]
        for line, _ in taken:
            self._read += len(line)
            self._digest.update(line)
        return [record for _, record in taken if record is not None]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _size(self) -> int:
        assert self._file is not None
        return os.fstat(self._file.fileno()).st_size

    def _reopen(self, size: int, digest: str) -> None:
        """Open the file that is there now, and check that it begins with what was read."""
        self.close()
        self._file = os.fdopen(open_regular(self.path), "rb")
        begin, left = hashlib.sha256(), size
        while left and (block := self._file.read(min(left, BLOCK))):
            begin.update(block)
            left -= len(block)
        if left or begin.hexdigest() != digest:
            raise Rewound
        self._read, self._digest = size, begin


class RunFiles:
    """The steps of a run as it writes them."""

    def __init__(self, run: Path, redactor: Redactor):
        self._redactor = redactor
        self._metrics = GrowingFile(run / "metrics.jsonl")
        self._samples = GrowingFile(run / "samples.jsonl")
        self._files = {file.path.name: file for file in (self._metrics, self._samples)}

    @property
    def positions(self) -> dict[str, Position]:
        """File → what was read of it."""
        return {name: file.position for name, file in self._files.items()}

    def skip(self, positions: dict[str, Position]) -> None:
        """Continue after what an earlier process has read. Raises Rewound."""
        for name, file in self._files.items():
            file.skip(positions[name])

    def new_updates(self) -> list[Update]:
        """What was added since the last call, in the order of steps; empty if there is nothing.
        Where a file has more than is read at a time, the other one waits for it. Raises Rewound."""
        updates: dict[int, Update] = {}

        def update_of(record: Record) -> Update:
            return updates.setdefault(record["step"], Update(record["step"]))

        samples, metrics = (file.new_lines() for file in (self._samples, self._metrics))
        last = min(samples.last_step, metrics.last_step)
        for record in self._samples.take(samples, last):
            if (sample := self._sample(record)) is not None:
                update_of(record).samples.append(sample)
        for record in self._metrics.take(metrics, last):
            update_of(record).numbers.update(_numbers(with_nonfinite(record)))
        return [updates[step] for step in sorted(updates)]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _sample(self, record: Record) -> SampleRecord | None:
        try:
            return SampleRecord(**self._redactor.value(record))
        except TypeError:  # not a sample
            return None


def _record(line: bytes) -> Record | None:
    """The object in a line; None for anything that has no step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _numbers(record: Record) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float)
    }
