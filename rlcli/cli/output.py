"""Output of the verbs: data on stdout, as a table, as text or as JSON;
progress and notes on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from rlcli.errors import (
    Errors,
    Problem,
    RecipeError,
    ResourceError,
    RlcliError,
    escape_control,
    in_signs_of,
    render,
)
from rlcli.launch.lifeline import moved_out_of_the_way
from rlcli.observe.status_line import can_redraw

quiet = False
"""Whether to suppress all output that is neither an error nor the result."""
_results: TextIO | None = None
"""Where results are written if not on `sys.stdout`."""


class OutputClosed(Exception):
    """Nobody reads our output any more. Not an OSError,
    because typer would turn that into exit code 1."""


class OutputFailed(ResourceError):
    """Our output cannot be written, for instance because the disk is full."""

    def __init__(self, error: OSError):
        super().__init__(f"cannot write the output: {error.strerror or error}")


def print_json(value: Any) -> None:
    """Print one JSON document on stdout; characters that a terminal might interpret are escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, allow_nan=False)
    write_text(text + "\n")


def print_text(text: str = "") -> None:
    """Print text on stdout, safe for a terminal."""
    write_text(escape_control(text) + "\n")


def print_labelled(label: str, text: str) -> None:
    """Print a text on stdout, indented and next to its label, safe for a terminal."""
    for number, line in enumerate(text.strip("\n").split("\n")):
        print_text(f"    {label if number == 0 else '':<8}  {line}")


def print_piece(text: str) -> None:
    """Print part of a text immediately, safe for a terminal."""
    write_text(escape_control(text))
    flush()


def print_talk(text: str) -> None:
    """Print a note on stderr, safe for a terminal, after all that is on stdout;
    nothing with `--quiet`."""
    if not quiet:
        flush()
        _talk(escape_control(text))


def print_error(error: RlcliError) -> None:
    """Print an error on stderr, each hint on its own line, wrapped to the terminal, with ids and
    hints highlighted.

    It is printed even if stdout cannot be written, which the next flush reports."""
    with contextlib.suppress(OutputClosed, OutputFailed):
        flush()
    width = terminal_width() if sys.stderr.isatty() else sys.maxsize
    text = "\n".join(_error_lines(error, width))
    if has_colour(sys.stderr):
        text = re.sub(r"^error\[\w+\]", "\x1b[1;31m\\g<0>\x1b[0m", text, flags=re.MULTILINE)
        text = re.sub(r"^  hint:", "\x1b[1m\\g<0>\x1b[0m", text, flags=re.MULTILINE)
    _talk(text)


def _error_lines(error: RlcliError | Problem, width: int) -> Iterator[str]:
    if isinstance(error, RecipeError | Errors):
        for problem in error.problems:
            yield from _error_lines(problem, width)
        return
    lines = render(error.code, error.what, error.where, None).splitlines()
    lines += escape_control(f"  hint: {error.hint}").splitlines() if error.hint else []
    for line in lines:
        yield from (
            wrapped(line, rest="    ", width=width).split("\n") if len(line) > width else [line]
        )
    if isinstance(error, Problem) and error.excerpt:
        yield error.excerpt


def wrapped(text: str, first: str = "", rest: str = "", width: int = 79) -> str:
    """The text in lines of at most `width` columns, unless a word is longer; `first` and `rest`
    begin the lines."""
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def speaks_unicode() -> bool:
    """Whether stdout can show all characters."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def terminal_width() -> int:
    """Columns of the terminal; 80 if there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    *,
    numbers: bool = False,
) -> None:
    """Print a table that fits the terminal, 80 columns if there is none; the last column wraps.
    `numbers`: all columns but the first hold numbers, and wrap between them only."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    paper = io.StringIO()
    console = Console(
        file=paper, highlight=False, soft_wrap=False, force_terminal=has_colour(sys.stdout)
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    heads, *cells = [[escape_control(cell) for cell in row] for row in (columns, *rows)]
    widths = _widths_of_numbers([heads, *cells], console.width) if numbers else [None] * len(heads)
    for index, (head, width) in enumerate(zip(heads, widths, strict=True)):
        is_last = index == len(heads) - 1 and not numbers
        is_whole = index == 0 and not numbers
        table.add_column(
            Text(head), no_wrap=is_whole, overflow="fold", ratio=1 if is_last else None, width=width
        )
    for row in cells:
        table.add_row(*map(Text, row))
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
    write_text("".join(line.rstrip() + "\n" for line in paper.getvalue().splitlines()))


def print_entries(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column names what one may want to copy. Where names leave no room
    for the other columns, these are below each name."""
    cells = [[escape_control(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if sum(widths) + GAP * (len(widths) - 1) <= terminal_width():
        print_table(columns, rows)
        return
    for name, *others in rows:
        print_text(name)
        print_described("  ", ", ".join(other for other in others if other != "-"))


def print_described(label: str, text: str) -> None:
    """Print a text next to its label, safe for a terminal; there, it wraps between words."""
    width = terminal_width() if sys.stdout.isatty() else sys.maxsize
    margin = " " * len(label)
    lines = text.splitlines() or [""]
    for first, line in zip([label, *[margin] * len(lines)], lines, strict=False):
        line = escape_control(line)
        print_text(wrapped(line, first, margin, width) if len(line) > width else first + line)


GAP = 3
"""Characters between two columns of a table."""
NARROWEST = 12
"""Minimum width of a column of names."""


def _widths_of_numbers(lines: Sequence[Sequence[str]], width: int) -> list[int | None]:
    """The widths of a table's columns: their natural ones if these fit; else columns of numbers are
    as wide as their longest word, and the first column gets the rest."""
    natural = [max(map(len, column)) for column in zip(*lines, strict=True)]
    gaps = GAP * (len(natural) - 1)
    if sum(natural) + gaps <= width:
        return list(natural)
    least = [max(map(len, " ".join(column).split())) for column in zip(*lines, strict=True)]
    widths = [min(natural[0], max(NARROWEST, width - gaps - sum(least[1:]))), *least[1:]]
    spare = width - gaps - sum(widths)
    # a wrapped number is harder to read than its heading
    for index, cells in enumerate(zip(*lines[1:], strict=True)):
        growth = max(0, min(spare, max(map(len, cells)) - widths[index]))
        widths[index] += growth
        spare -= growth
    return list(widths)


def print_styled(*parts: tuple[str, str]) -> None:
    """Print one line of (text, Rich style) parts on stdout, safe for a terminal;
    styled only where colours are on."""
    from rich.console import Console
    from rich.text import Text

    paper = io.StringIO()
    console = Console(
        file=paper, highlight=False, soft_wrap=True, force_terminal=has_colour(sys.stdout)
    )
    console.print(Text.assemble(*((escape_control(text), style) for text, style in parts)))
    write_text(paper.getvalue())


def _talk(text: str) -> None:
    """Write to stderr; a terminal that is gone must not change how a command ends."""
    try:
        print(in_signs_of(sys.stderr.encoding, text), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(sys.stderr)


def keep_stdout_for_results() -> None:
    """From now on only results reach the reader of stdout; what else this process and its children
    write there goes to stderr, such as a component's `print`."""
    global _results
    flush()
    descriptor = moved_out_of_the_way(os.dup(sys.stdout.fileno()))
    _results = os.fdopen(
        descriptor, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, newline=""
    )
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def flush() -> None:
    """Flush stdout. Raises OutputClosed, OutputFailed."""
    try:
        sys.stdout.flush()
        if _results is not None:
            _results.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error
    except OSError as error:
        raise OutputFailed(error) from error


def open_closed_streams() -> None:
    """Open closed standard streams on /dev/null: a file opened next must not become our stdout."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        handle = os.open(os.devnull, os.O_RDWR)
        if handle != number:
            os.dup2(handle, number)
            os.close(handle)
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace"))


def silence(*streams: TextIO) -> None:
    """Redirect our streams (all, or those given) to /dev/null,
    so that Python can flush them at exit."""
    for stream in filter(None, streams or (sys.stdout, sys.stderr, _results)):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def write_text(text: str) -> None:
    """Write text to stdout as it is, in characters that its encoding has."""
    try:
        (_results or sys.stdout).write(in_signs_of(sys.stdout.encoding, text))
    except BrokenPipeError as error:
        raise OutputClosed from error
    except OSError as error:
        raise OutputFailed(error) from error


def has_colour(stream: TextIO) -> bool:
    """Whether to use colours, by `NO_COLOR` and `FORCE_COLOR`; without them, on a terminal that
    supports colours."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return can_redraw(stream)
