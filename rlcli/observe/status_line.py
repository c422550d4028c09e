"""A transient status line on a terminal; nothing elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlcli.observe.terminal import one_line, open_console


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield `say(text)`, which sets the line."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        yield lambda text: None
        return
    with open_console(sys.stderr).status("starting") as status:
        yield lambda text: status.update(one_line(text))
