"""What a user's code prints in an isolated process, for the log of its rank."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rlcli.errors import escape_control

LONGEST = 3000
"""Characters kept of what is printed at a time; the end says most."""
HELD = 1 << 16
"""Bytes of it that are certainly in memory: more than LONGEST, so that a secret at its beginning is
whole, and not many."""
STDERR = 2


class Prints:
    """What Python code of this process prints from now on, to stdout and stderr; a fork has its
    own. What programs that it starts print is not among it."""

    def __init__(self) -> None:
        self._memory = _Memory()
        sys.stdout = sys.stderr = io.TextIOWrapper(
            self._memory, "utf-8", "backslashreplace", write_through=True
        )

    def added_to(
        self, reply: Mapping[str, Any], clean: Callable[[str], str] = str
    ) -> dict[str, Any]:
        """The reply, with what was printed since the one before, if anything, as `printed`;
        `clean` is applied to it first."""
        text = self._memory.getvalue().decode(errors="replace")
        self._memory.empty()
        return {**reply, "printed": clean(text)[-LONGEST:]} if text else dict(reply)


class _Memory(io.BytesIO):
    """The end of what was written. Has what code may ask of a standard stream."""

    def write(self, data: Any) -> int:
        written = super().write(data)
        if self.tell() > 2 * HELD:
            end = self.getvalue()[-HELD:]
            self.empty()
            super().write(end)
        return written

    def empty(self) -> None:
        self.seek(0)
        self.truncate()

    def fileno(self) -> int:
        return STDERR

    def close(self) -> None:
        """Nothing: what is printed afterwards is kept, too."""


def show_prints(printed: Any) -> None:
    """Print what came with a reply, if anything, on stderr and safe for a terminal."""
    if isinstance(printed, str):
        with contextlib.suppress(OSError, ValueError):  # a closed stream costs the lines alone
            print(escape_control(printed.rstrip("\n")), file=sys.stderr)
