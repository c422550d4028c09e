"""The end of a file that another process may still be writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from rlcli.files import open_regular

LARGEST_LINE = 1 << 24
"""Maximum size of an unfinished line that is waited for, in bytes; a longer one is skipped."""
FIRST_LOOK, LARGEST_END = 1 << 16, 1 << 22
"""Bytes at the end of a file that are searched for its last lines, at first and at most."""


class Tail:
    """The whole lines of a growing file, each once. A file that was truncated or replaced is read
    from the start."""

    def __init__(self, path: Path):
        self.path = path
        self._read = 0
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that has been read so far."""

    def last(self, count: int) -> list[bytes]:
        """The last whole lines; `lines` continues after them."""
        for end in (FIRST_LOOK, LARGEST_END):
            try:
                with open(open_regular(self.path), "rb") as file:
                    start = max(0, self._look(file) - end)
                    lines = self._whole_lines(file, start)
            except OSError:
                return []
            if not start or len(lines) > count:
                break
        return (lines[1:] if start else lines)[-count:] if count else []

    def lines(self) -> tuple[list[bytes], bool]:
        """Lines added since the last call, and whether the file was restarted,
        so that earlier ones are void."""
        before = self._file
        try:
            with open(open_regular(self.path), "rb") as file:
                is_new = self._look(file) < self._read or before not in (None, self._file)
                return self._whole_lines(file, 0 if is_new else self._read), is_new
        except OSError:
            return [], False

    def unfinished_line(self) -> bytes:
        """What follows the last whole line, if nobody will finish it."""
        try:
            with open(open_regular(self.path), "rb") as file:
                file.seek(self._read)
                return file.read(LARGEST_LINE)
        except OSError:
            return b""

    def _look(self, file: BinaryIO) -> int:
        """Remember which file it is. Returns its size."""
        stat = os.fstat(file.fileno())
        self._file = (stat.st_dev, stat.st_ino)
        return stat.st_size

    def _whole_lines(self, file: BinaryIO, start: int) -> list[bytes]:
        file.seek(start)
        content = file.read()
        finished, newline, rest = content.rpartition(b"\n")
        self._read = start + len(content if len(rest) > LARGEST_LINE else finished + newline)
        return finished.split(b"\n") if newline else []


def last_lines(path: Path, count: int) -> list[bytes]:
    """The last lines of a file, including an unfinished one; empty if it cannot be read."""
    try:
        with open(open_regular(path), "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LARGEST_END)
            file.seek(start)
            lines = file.read(LARGEST_END).split(b"\n")
    except OSError:
        return []
    lines = lines if lines[-1] else lines[:-1]
    return (lines[1:] if start else lines)[-count:] if count else []
