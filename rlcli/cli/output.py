"""What the verbs share in printing: data on stdout, as a table, as text or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rlcli.errors import escape_control


class OutputClosed(Exception):
    """Nobody reads our output any more. Not an OSError, which typer would turn into exit code 1."""


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    _write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_text(text: str = "") -> None:
    """Text on stdout, safe for a terminal."""
    _write(escape_control(text) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """A table that fits the terminal, 80 columns where there is none; the last column wraps."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold", ratio=1 if index == len(columns) - 1 else None)
    for row in rows:
        table.add_row(*(Text(escape_control(cell)) for cell in row))
    console = Console(highlight=False, soft_wrap=False)
    with console.capture() as captured:
        if title:
            console.print(Text(title, style="bold"))
        console.print(table)
    _write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
    except BrokenPipeError as error:
        raise OutputClosed from error
