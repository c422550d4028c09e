"""Output that cannot break a run: a closed pipe or a full disk behind stderr only silences it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, TextIO, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from rlcli.errors import escape_control, in_signs_of


class PatientStream:
    """A text stream that goes quiet once its reader is gone, and that can print every character."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._open = True
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._open:
            try:
                self._stream.write(in_signs_of(self.encoding, text))
            except RuntimeError:  # a signal handler prints in the middle of another line
                with contextlib.suppress(OSError, ValueError):
                    os.write(self.fileno(), text.encode(self.encoding, "backslashreplace"))
            except (OSError, ValueError) as error:
                self._go_quiet(error)
        return len(text)

    def flush(self) -> None:
        if self._open:
            try:
                self._stream.flush()
            except RuntimeError:  # already being flushed when a signal handler interrupted it
                pass
            except (OSError, ValueError) as error:
                self._go_quiet(error)

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def _go_quiet(self, error: Exception) -> None:
        """Go silent, and redirect a broken pipe to nowhere for others that still print to it."""
        self._open = False
        if isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def open_console(stream: TextIO, **options: Any) -> Console:
    """A Rich console that prints text as it is: no markup, no emoji codes,
    no guessed highlighting."""
    options = {"markup": False, "highlight": False, "emoji": False, **options}
    return Console(file=cast(TextIO, PatientStream(stream)), **options)


def speaks_unicode(console: Console) -> bool:
    return console.encoding.lower().replace("-", "").startswith("utf")


def short_path(path: os.PathLike[str] | str) -> str:
    """The path relative to the working directory, if it is below it."""
    absolute = Path(os.path.abspath(path))
    return (
        str(absolute.relative_to(Path.cwd()))
        if absolute.is_relative_to(Path.cwd())
        else str(absolute)
    )


def one_line(text: str) -> str:
    """Text of any origin as one printable line."""
    return escape_control(" ".join(text.split()))


def cut(text: str, width: int, unicode: bool) -> str:
    """One printable line of at most `width` columns, without its end if it is longer."""
    text, sign = one_line(text), "…" if unicode else "~"
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + sign


def bar(done: int, total: int, width: int, unicode: bool) -> Text:
    """A bar of `width` columns, filled in proportion."""
    full, rest = ("━", "─") if unicode else ("#", "-")
    width = max(0, width)
    filled = min(width, width * done // total)
    return Text.assemble((full * filled, "green"), (rest * (width - filled), "dim"))
