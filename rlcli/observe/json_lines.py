"""Append-only files of one JSON object per line: in the file when `write` returns; reading errors
name `file:line`."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from rlcli.errors import DataError, ResourceError
from rlcli.files import make_folder, open_private, open_regular, replace_file
from rlcli.units import count

Warn = Callable[[str], None]
"""Takes one sentence about something that went wrong while training continues."""

log = logging.getLogger(__name__)

LARGEST_BACKLOG = 64 << 20
"""Maximum size of the lines that wait in memory, in bytes."""
BLOCK = 1 << 16

Span = tuple[int, int]
"""[begin, end) in bytes of a file."""


def encode(value: Mapping[str, Any]) -> str:
    """One line of strict JSON. Characters that a terminal would act on become `\\uXXXX`,
    so that `cat` is safe."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return (
        text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)
    )


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) != 0x7F else "\\u007f"


def plain_number(value: Any) -> Any:
    """The Python number inside a numpy or torch scalar; anything else as it is."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return value.item() if hasattr(value, "item") else value


def is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def finite(value: float | None) -> float | None:
    """A number as JSON has it: None for one that is not finite."""
    return None if is_nonfinite(value) else value


class JsonLines:
    """Appends objects to a file, as whole lines only.

    A failing disk does not stop training: lines that cannot be written wait in memory and are
    written later, in order.
    """

    _opened: os.stat_result
    """The file that was opened last."""

    def __init__(self, path: Path, warn: Warn = log.warning):
        self.path = path
        self._warn = warn
        self._descriptor: int | None = None
        self._end = 0
        """Size of the file's whole lines, in bytes."""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_failing = False
        self._is_doubtful = False
        """A sync has failed: how much of the file is on disk is unknown."""
        self._catch_up()

    @property
    def waiting(self) -> int:
        """Lines that are not in the file yet."""
        return len(self._waiting)

    def write(self, value: Mapping[str, Any]) -> None:
        """Append one object; unless the disk fails, the line is in the file when this returns.

        Raises ResourceError F28 once more than LARGEST_BACKLOG bytes wait.
        """
        line = _line(value)
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        error = self._catch_up()
        if error is not None and self._waiting_bytes > LARGEST_BACKLOG:
            message = f"{self.waiting} lines wait to be written: {error.strerror or error}"
            raise ResourceError(
                message, where=str(self.path), hint="make room, then rlcli resume", code="F28"
            )

    def replace_last(self, value: Mapping[str, Any]) -> None:
        """Replace the last line, which is in the file, by another one. If the disk has no room for
        the new file, that line follows it."""
        try:
            with open(open_regular(self.path), "rb") as file:
                begin = _end_of_lines(file.fileno(), self._end - 1)
                replace_file(self.path, chain(_blocks(file, [(0, begin)]), [_line(value)]))
            self._let_go()
            self._open()
        except OSError:
            self.write(value)

    def sync(self) -> None:
        """Sync every written line to disk, also those of a file that somebody has removed. Raises
        OSError; a later call tries again."""
        error = self._catch_up()
        if error is not None:
            raise error
        try:
            is_displaced = self._is_displaced
            if is_displaced:
                self._warn(
                    f"{self.path.name} was removed or replaced while the run wrote it; it is put "
                    f"back, with all lines ({self.path})"
                )
            # a file whose sync failed cannot be trusted any more
            if self._is_doubtful or is_displaced:
                self._write_anew()
            assert self._descriptor is not None
            os.fsync(self._descriptor)
            self._is_doubtful = False
        except OSError:
            self._is_doubtful = True
            raise

    def close(self) -> None:
        """Write the waiting lines, if that is possible now."""
        self._catch_up()
        self._let_go()

    def _catch_up(self) -> OSError | None:
        """Write the waiting lines; returns the error if some are still waiting."""
        try:
            if self._descriptor is None:
                self._open()
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
        except OSError as error:
            self._let_go()
            if not self._is_failing:
                self._warn(
                    f"{self.path.name} cannot be written now, its lines are kept: "
                    f"{error.strerror or error} ({self.path})"
                )
            self._is_failing = True
            return error
        if self._is_failing:
            self._warn(f"{self.path.name} is being written again; no line is missing")
        self._is_failing = False
        return None

    def _open(self) -> None:
        """Open the file after its last whole line: a writer that was killed may have left half a
        line."""
        self._descriptor = open_private(self.path, os.O_RDWR | os.O_APPEND)
        self._opened = os.fstat(self._descriptor)
        self._end = _end_of_lines(self._descriptor, self._opened.st_size)
        os.ftruncate(self._descriptor, self._end)

    @property
    def _is_displaced(self) -> bool:
        """Whether somebody has removed the file, or put another one in its place."""
        assert self._descriptor is not None
        if not os.path.samestat(os.fstat(self._descriptor), self._opened):
            return False  # a component has taken the descriptor: it says nothing about the file
        try:
            return not os.path.samestat(os.stat(self.path), self._opened)
        except FileNotFoundError:
            return True

    def _write_anew(self) -> None:
        """Write the file again, with what the open one holds."""
        assert self._descriptor is not None
        make_folder(self.path.parent)
        with os.fdopen(os.dup(self._descriptor), "rb") as opened:
            replace_file(self.path, _blocks(opened, [(0, self._end)]))
        self._let_go()
        self._open()

    def _append(self, line: bytes) -> None:
        """Append one line, completely or not at all."""
        assert self._descriptor is not None
        left = line
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(line)

    def _let_go(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a component may have closed it
                os.close(self._descriptor)
            self._descriptor = None


def _line(value: Mapping[str, Any]) -> bytes:
    return f"{encode(value)}\n".encode()


def _end_of_lines(descriptor: int, end: int) -> int:
    """Size of the whole lines among the first `end` bytes of a file, in bytes."""
    while end:
        start = max(0, end - BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


@dataclass(frozen=True)
class Dropped:
    """Lines that were removed from a file."""

    file: str
    steps: tuple[int, ...]
    """The steps of these lines, each once, in order."""
    lines: int
    unreadable: int = 0
    """Number of these lines whose step cannot be read."""

    def __str__(self) -> str:
        of = f" of step {self.steps[0]}" if len(self.steps) == 1 else ""
        of = f" of steps {self.steps[0]} to {self.steps[-1]}" if len(self.steps) > 1 else of
        unreadable = f", {self.unreadable} of them unreadable" if self.unreadable else ""
        return f"{self.file}: {count(self.lines, 'line')}{of} dropped{unreadable}"


def keep_until(path: Path, step: int) -> Dropped | None:
    """Drop the lines of steps after `step`, and an unfinished last line;
    the others are kept byte for byte.

    Returns what was dropped, if anything was.
    """
    if not path.exists():
        return None
    with open(open_regular(path), "rb") as file:
        retained, dropped_steps = _divided(file, step)
        if not dropped_steps:
            return None
        replace_file(path, _blocks(file, retained))
    readable = [int(dropped) for dropped in dropped_steps if math.isfinite(dropped)]
    return Dropped(
        path.name,
        tuple(sorted(set(readable))),
        len(dropped_steps),
        len(dropped_steps) - len(readable),
    )


def _divided(file: BinaryIO, step: int) -> tuple[list[Span], list[float]]:
    """Where the lines up to a step are, and the steps of the others."""
    retained, dropped_steps = list[Span](), list[float]()
    begin = end = 0
    for line in file:
        line_step, begin, end = _step_of(line), end, end + len(line)
        if not (line.endswith(b"\n") and line_step <= step):
            dropped_steps.append(line_step)
        elif retained and retained[-1][1] == begin:
            retained[-1] = retained[-1][0], end
        else:
            retained.append((begin, end))
    return retained, dropped_steps


def _blocks(file: BinaryIO, spans: Iterable[Span]) -> Iterator[bytes]:
    """The content of parts of a file, a part of it at a time: files of long runs are large."""
    for begin, end in spans:
        file.seek(begin)
        for start in range(begin, end, BLOCK):
            yield file.read(min(BLOCK, end - start))


def _step_of(line: bytes) -> float:
    """The step of a line; infinite if it cannot be read."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return math.inf


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order; an unfinished last line is skipped."""
    with open(open_regular(path), encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith("\n"):
                    return
                raise DataError(
                    f"not JSON: {_reason(error)}", where=f"{path}:{number}", code="F31"
                ) from None
            if not isinstance(value, dict):
                raise DataError("not a JSON object", where=f"{path}:{number}", code="F31")
            yield value


def _reason(error: ValueError | RecursionError) -> str:
    """Why a line is not JSON."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else "too long a number"
