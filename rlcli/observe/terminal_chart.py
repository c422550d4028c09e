"""A chart as lines of text: each curve has one colour, or one letter where there are no colours, or
not enough of them."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rlcli.observe.charts import Chart, ChartLine
from rlcli.observe.series import HUGE, short

Styled = tuple[tuple[str, str], ...]
"""(text, Rich style) of one line of text."""

STYLES = ("cyan", "magenta", "yellow", "green", "red", "blue")
LETTERS = string.ascii_letters
HEIGHT = 10
AXIS_WIDTH = 10
"""Columns for the numbers on the left."""
LEAST_WIDTH = 20
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a Braille character, by row and column."""


@dataclass
class Character:
    """One character of the canvas."""

    dots: int = 0
    owner: int = 0
    """Number of the line that was drawn there last."""


def chart_lines(chart: Chart, width: int, *, colours: bool, unicode: bool) -> Iterator[Styled]:
    """Title, canvas with axes, and a legend with the last value of each line."""
    room = max(LEAST_WIDTH, width - AXIS_WIDTH - 2)
    fine = unicode and (len(chart.lines) == 1 or (colours and _have_colours(chart.lines)))
    yield ((chart.title, "bold"),)
    yield from _plot(chart, room, fine, "│" if unicode else "|")
    for line in chart.lines:
        mark = letter(line.number)
        if fine:  # the letter is that of its row in a table
            mark = f"{mark} ━━" if len(chart.lines) > 1 or line.number else "━━"
        yield from _entry_of_legend(line, mark, STYLES[line.number % len(STYLES)], room)


def letter(number: int) -> str:
    """That of a run or group in all charts."""
    return LETTERS[number % len(LETTERS)]


def _have_colours(lines: Sequence[ChartLine]) -> bool:
    """Whether each line has a colour of its own."""
    return max(line.number for line in lines) < len(STYLES)


def _plot(chart: Chart, room: int, fine: bool, edge: str) -> Iterator[Styled]:
    """The canvas with its axes."""
    low, high = _bounds(chart.lines)
    first = min(line.steps[0] for line in chart.lines)
    last = max(line.steps[-1] for line in chart.lines)
    labels = {0: short(high), HEIGHT // 2: short((low + high) / 2), HEIGHT - 1: short(low)}
    for row, cells in enumerate(_canvas(chart, (first, last), (low, high), room)):
        drawn = [(_sign(cell, fine), STYLES[cell.owner % len(STYLES)]) for cell in cells]
        yield (f"{labels.get(row, ''):>{AXIS_WIDTH}} ", "dim"), (edge, "dim"), *drawn
    yield ((_axis_of_steps(first, last, room), "dim"),)


def _axis_of_steps(first: float, last: float, room: int) -> str:
    left, right = f"{first:.12g}", f"step {last:.12g}"
    return f"{'':>{AXIS_WIDTH + 2}}{left:<{max(1, room - len(right))}}{right}"


def _entry_of_legend(line: ChartLine, mark: str, style: str, room: int) -> Iterator[Styled]:
    words, *continued = wrap(_legend(line), room - len(mark) - 1, break_long_words=False)
    margin = f"{'':>{AXIS_WIDTH}}  "
    yield (margin, ""), (mark, style), (f" {words}", "")
    for words in continued:
        yield ((f"{margin}{'':{len(mark)}} {words}", ""),)


def _canvas(
    chart: Chart, steps: tuple[float, float], bounds: tuple[float, float], width: int
) -> list[list[Character]]:
    """Rows of cells, the highest values first, with the dots of all lines."""
    cells = [[Character() for _ in range(width)] for _ in range(HEIGHT)]
    for line in chart.lines:
        for x, y in _points(line, steps, bounds, width * 2, HEIGHT * 4):
            cell = cells[y // 4][x // 2]
            cell.dots |= DOTS[y % 4][x % 2]
            cell.owner = line.number
    return cells


def _legend(line: ChartLine) -> str:
    """The label of a line, and its last value with its spread."""
    spread = f" ± {short(line.spread[-1])}" if line.spread else ""
    return f"{line.label}  {short(line.values[-1])}{spread}"


def _sign(cell: Character, fine: bool) -> str:
    if not cell.dots:
        return " "
    return chr(BRAILLE + cell.dots) if fine else letter(cell.owner)


def _bounds(lines: Sequence[ChartLine]) -> tuple[float, float]:
    """The smallest and the largest value, spread included."""
    ends = []
    for line in lines:
        for index, value in enumerate(line.values):
            reach = line.spread[index] if line.spread else 0.0
            ends += [value - reach, value + reach]
    low, high = max(-HUGE, min(ends)), min(HUGE, max(ends))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _points(
    line: ChartLine,
    steps: tuple[float, float],
    bounds: tuple[float, float],
    width: int,
    height: int,
) -> Iterator[tuple[int, int]]:
    """The dots of a line: joined, each column the mean of its steps;
    its spread is dotted above and below."""
    middle = _columns(line.steps, line.values, steps, width)
    yield from _joined(middle, bounds, height)
    for sign in (-1, 1) if line.spread else ():
        ends = [
            value + sign * reach
            for value, reach in zip(line.values, line.spread or (), strict=True)
        ]
        dots = _joined(_columns(line.steps, ends, steps, width), bounds, height)
        yield from ((x, y) for x, y in dots if x % 4 == 0)


def _columns(
    at: Sequence[float], values: Sequence[float], steps: tuple[float, float], width: int
) -> dict[int, float]:
    first, last = steps
    scale = (width - 1) / (last - first) if last > first else 0.0
    values_by_column: dict[int, list[float]] = {}
    for step, value in zip(at, values, strict=True):
        values_by_column.setdefault(round((step - first) * scale), []).append(
            max(-HUGE, min(HUGE, value))
        )
    return {x: sum(some) / len(some) for x, some in values_by_column.items()}


def _joined(
    columns: dict[int, float], bounds: tuple[float, float], height: int
) -> Iterator[tuple[int, int]]:
    """The dots between each column with a value and the next, without gaps at steep places."""
    low, high = bounds
    at, y = min(columns), 0
    for number, x in enumerate(sorted(columns)):
        end = max(0, min(height - 1, round((high - columns[x]) * (height - 1) / (high - low))))
        begin = y if number else end
        for between in range(at + 1 if number else at, x + 1):
            share = (between - at) / (x - at) if x > at else 1.0
            before, y = y if number else end, round(begin + (end - begin) * share)
            yield from (
                (between, dot) for dot in range(min(before, y), max(before, y) + 1) if dot != before
            )
            yield between, y
        at, y = x, end
