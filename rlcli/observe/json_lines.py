"""Append-only files of one JSON object per line: on file when `write` returns, read with `file:line`."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcli.errors import DataError
from rlcli.files import open_private, replace_file

Warn = Callable[[str], None]
"""Takes one sentence about something that went wrong while training goes on."""

log = logging.getLogger(__name__)


def encode(value: Mapping[str, Any]) -> str:
    """One line of strict JSON. What a terminal would act on becomes `\\uXXXX`, so that `cat` is safe."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) != 0x7F else "\\u007f"


def plain_number(value: Any) -> Any:
    """The Python number inside a numpy or torch scalar; anything else as it is."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return value.item() if hasattr(value, "item") else value


def is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class JsonLines:
    """Appends objects to a file. A disk that fails costs the lines and one warning, never the training."""

    def __init__(self, path: Path, warn: Warn = log.warning):
        self.path = path
        self._warn = warn
        self._descriptor: int | None = None
        try:
            self._descriptor = open_private(path, os.O_RDWR | os.O_APPEND)
            self._end_torn_line()
        except OSError as error:
            self._give_up(error)

    def write(self, value: Mapping[str, Any]) -> None:
        """Append one object; the line is in the file when this returns."""
        if self._descriptor is None:
            return
        line = f"{encode(value)}\n".encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _end_torn_line(self) -> None:
        """A killed writer may have left half a line; start on a fresh one, so that only that half is lost."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def _give_up(self, error: OSError) -> None:
        self._warn(f"{self.path.name} is no longer written: {error.strerror or error} ({self.path})")
        self.close()


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and a last line that was not finished; the others stay byte for byte."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
    replace_file(path, b"".join(kept))


def _step_of(line: bytes) -> float:
    """The step that a line speaks of; infinite if it cannot be read."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order; a last line that its writer did not finish is left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):
                    return
                raise DataError(f"not JSON: {error.msg}", where=f"{path}:{number}", code="F31") from None
            if not isinstance(value, dict):
                raise DataError("not a JSON object", where=f"{path}:{number}", code="F31")
            yield value
