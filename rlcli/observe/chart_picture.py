"""Charts as one PNG: a panel for each metric, a line for each run or group of runs,
spread shown as a band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli.observe.charts import Chart, ChartLine
from rlcli.observe.plot import draw_panels, smooth_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f4e79", "#c8553d", "#3c7d4f", "#8a5aa8", "#b8860b", "#4a4a4a", "#d17aa0", "#2a9d9d")
NOISY = 24
"""Number of values from which a line is drawn smoothed, over a faint one."""
LABEL_HEIGHT = 0.22
"""Inches."""
MOST_LABELS = 12
"""Number of lines above which the legend would hide them."""


def draw_charts(charts: Sequence[Chart]) -> bytes:
    """PNG bytes. A line has one colour in all panels; a single one is named in the title."""
    labels = list(dict.fromkeys(line.label for chart in charts for line in chart.lines))
    colours = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}
    has_legend = len(labels) > 1 or charts[0].lines[0].spread is not None

    def draw(number: int, axis: Axes) -> tuple[float, float]:
        lines = charts[number].lines
        for line in lines:
            _draw_line(axis, line, colours[line.label])
        return min(min(line.steps) for line in lines), max(max(line.steps) for line in lines)

    def finish(figure: Figure) -> None:
        if has_legend:
            _legend(figure, colours)

    titles = [chart.title for chart in charts]
    title = ", ".join(titles) if has_legend else labels[0]
    height = LABEL_HEIGHT * min(len(labels), MOST_LABELS) if has_legend else 0.0
    return draw_panels(titles, title, draw, height, finish)


def _draw_line(axis: Axes, line: ChartLine, colour: str) -> None:
    is_noisy = len(line.values) >= NOISY and line.spread is None
    if line.spread is not None:
        low = [value - reach for value, reach in zip(line.values, line.spread, strict=True)]
        high = [value + reach for value, reach in zip(line.values, line.spread, strict=True)]
        axis.fill_between(line.steps, low, high, color=colour, alpha=0.18, linewidth=0)
    if is_noisy:
        axis.plot(line.steps, line.values, color=colour, alpha=0.25, linewidth=0.9)
    marker = "." if len(line.values) < 12 else None
    points = smooth_line(line.steps, line.values) if is_noisy else (line.steps, line.values)
    axis.plot(*points, color=colour, marker=marker, linewidth=1.7)


def _legend(figure: Figure, colours: dict[str, str]) -> None:
    """Draw the legend below all panels. Labels come from files and are not parsed as
    mathematics."""
    from matplotlib.lines import Line2D

    shown = list(colours.items())[:MOST_LABELS]
    handles = [Line2D([], [], color=colour, linewidth=2) for _, colour in shown]
    names = [label for label, _ in shown]
    legend = figure.legend(
        handles, names, loc="outside lower left", fontsize=8, frameon=False, ncols=1
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
