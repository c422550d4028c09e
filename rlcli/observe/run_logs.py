"""Logs of a run's processes: one file for each rank, node and server, in `logs/`."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rlcli.api.run_folder import LOGS
from rlcli.files import make_folder, open_private


def run_logs(run: Path) -> dict[str, Path]:
    """Name → file: `rank0`, `rank1`, …, `node0`, …, `stacks`; ranks come first."""
    try:
        names = [
            entry.name.removesuffix(".log")
            for entry in os.scandir(run / LOGS)
            if entry.name.endswith(".log")
        ]
    except OSError:
        return {}
    return {name: run / LOGS / f"{name}.log" for name in sorted(names, key=_order)}


def as_text(line: bytes) -> str:
    """A line of a log as text."""
    return line.decode(errors="replace").removesuffix("\r")


def _order(name: str) -> tuple[bool, str, int]:
    head, number = re.fullmatch(r"(.*?)(\d*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    return head != "rank", head, int(number or 0)


class PrintedLog:
    """Copies what Python code of this process prints to a log, which begins with the first of it.
    That a disk is full costs lines of the log, and nothing else."""

    def __init__(self, file: Path):
        self._file = file
        self._lock = threading.Lock()
        self._inside = 0
        """How many threads are in `copying`."""
        self._installed: tuple[_CopiedStream, _CopiedStream] | None = None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copy what any thread prints meanwhile."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._installed = (
                    _CopiedStream(sys.stdout, self._add),
                    _CopiedStream(sys.stderr, self._add),
                )
                sys.stdout, sys.stderr = (cast(TextIO, copied) for copied in self._installed)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._restore()

    def _restore(self) -> None:
        assert self._installed is not None
        out, err = self._installed
        # a display that was started meanwhile has put itself in front of them
        sys.stdout = out.stream if sys.stdout is out else sys.stdout
        sys.stderr = err.stream if sys.stderr is err else sys.stderr

    def _add(self, text: str) -> None:
        with suppress(OSError):
            make_folder(self._file.parent)
            descriptor = open_private(self._file, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)


class _CopiedStream:
    """A stream, of which a copy is kept."""

    def __init__(self, stream: TextIO, keep: Callable[[str], None]):
        self.stream, self._keep = stream, keep

    def write(self, text: str) -> int:
        self._keep(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
