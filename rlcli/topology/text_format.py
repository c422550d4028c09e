"""Numbers, tables and paragraphs of a plan's text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rlcli import units

WIDTH = 80
WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
DOWN_TO_MIB = units.SIZES[:3]


def wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, **WHOLE_WORDS)


def size(number: int | None) -> str:
    """`3.7 GiB`, `0.02 MiB`."""
    return "unknown" if number is None else units.size(number, DOWN_TO_MIB)


def number(count: int) -> str:
    """`494 M` of parameters."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)


def amount(count: int, unit: int) -> str:
    """An amount in a unit, to three digits; `-` for nothing."""
    if count == 0:
        return "-"
    value = count / unit
    decimals = 0 if value >= 100 else 1
    return f"{value:.2f}" if value < 10 else f"{value:.{decimals}f}"


def duration(seconds: float) -> str:
    """`4:42`, or `0.3 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes else f"{seconds:.2g} s"


def aligned(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> Iterator[str]:
    """Columns under their headings; the last one wraps at 80 columns."""
    if not rows:
        return
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    before = sum(widths[:-1]) + 2 * len(widths)
    for row in table:
        *cells, last = _padded(row, widths, right)
        lines = [last]
        if len(row) - 1 not in right:
            lines = textwrap.wrap(row[-1], max(20, WIDTH - before), **WHOLE_WORDS) or [""]
        yield "  ".join(["", *cells, lines[0]]).rstrip()
        for line in lines[1:]:
            yield " " * before + line


def _padded(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> Iterator[str]:
    """Cells as wide as their columns, those of `right` with the blanks in front."""
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if column in right else cell.ljust(width)
