"""The live display in a notebook: one output of the cell, which is replaced as the run goes on."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group

from rlcli.api.headway import Count
from rlcli.observe.live import Drawing, LiveDisplay
from rlcli.observe.terminal import open_console

WIDTH = 80
REDRAW_SECONDS = 0.5
PAGE = '<pre style="line-height: 1.25">{code}</pre>'


def is_notebook() -> bool:
    """Whether this process executes the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class NotebookDisplay(LiveDisplay):
    """A `LiveDisplay` that redraws when something happens: a cell has no thread of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__(open_console(sys.stdout, width=WIDTH, force_jupyter=False), clock)

    def _start_drawing(self) -> Drawing:
        return CellOutput(self.picture)

    def phase(self, text: str) -> None:
        super().phase(text)
        self._redraw()

    def count(self, count: Count, of: str = "") -> None:
        super().count(count, of)
        self._redraw()

    def step(self, record: Mapping[str, Any]) -> None:
        super().step(record)
        self._redraw()

    def _redraw(self) -> None:
        if isinstance(self._live, CellOutput):
            self._live.redraw()


class CellOutput:
    """An output of the current cell."""

    def __init__(self, picture: Callable[[], Group]):
        from IPython.display import display

        self._picture = picture
        self._drawn = time.monotonic()
        self._output = display(self._drawing(), raw=True, display_id=True)

    def redraw(self) -> None:
        """Draw the picture again, unless that was done a moment ago."""
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self.stop()

    def stop(self) -> None:
        self._drawn = time.monotonic()
        self._output.update(self._drawing(), raw=True)

    def _drawing(self) -> dict[str, str]:
        """The picture as text and as HTML; both are escaped by rich."""
        console = Console(
            file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, force_jupyter=False
        )
        console.print(self._picture())
        text = console.export_text(clear=False)
        html = console.export_html(inline_styles=True, code_format=PAGE)
        return {"text/plain": text, "text/html": html}
