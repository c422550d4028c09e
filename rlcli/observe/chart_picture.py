"""Charts as one PNG: a panel for each metric, a line for each run or group of runs,
spread shown as a band."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli.observe.charts import Chart, ChartLine
from rlcli.observe.plot import DPI, ROW_HEIGHT, WIDTH, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1f4e79", "#c8553d", "#3c7d4f", "#8a5aa8", "#b8860b", "#4a4a4a", "#d17aa0", "#2a9d9d")
NOISY = 24
"""Number of values from which a line is drawn smoothed, over a faint one."""
LABEL_HEIGHT = 0.22
"""Inches."""
MOST_LABELS = 12
"""Number of lines above which the legend would hide them."""


def draw_charts(charts: Sequence[Chart], title: str) -> bytes:
    """PNG bytes. A line has one colour in all panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(2, len(charts))
    rows = (len(charts) + columns - 1) // columns
    labels = list(dict.fromkeys(line.label for chart in charts for line in chart.lines))
    height = ROW_HEIGHT * rows + LABEL_HEIGHT * min(len(labels), MOST_LABELS)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    axes = figure.subplots(rows, columns, squeeze=False)
    colours = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}
    for position, axis in enumerate(axes.flat):
        if position < len(charts):
            _draw(axis, charts[position], colours)
        else:
            axis.set_axis_off()
    if len(labels) > 1 or charts[0].lines[0].spread:
        _legend(figure, axes, colours)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw(axis: Axes, chart: Chart, colours: dict[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(chart.title, loc="left", fontsize=10, parse_math=False)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, color="#888888")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("step", fontsize=9)
    for line in chart.lines:
        _draw_line(axis, line, colours[line.label])


def _draw_line(axis: Axes, line: ChartLine, colour: str) -> None:
    is_noisy = len(line.values) >= NOISY and line.spread is None
    if line.spread is not None:
        low = [value - reach for value, reach in zip(line.values, line.spread, strict=True)]
        high = [value + reach for value, reach in zip(line.values, line.spread, strict=True)]
        axis.fill_between(line.steps, low, high, color=colour, alpha=0.18, linewidth=0)
    if is_noisy:
        axis.plot(line.steps, line.values, color=colour, alpha=0.25, linewidth=0.9)
    marker = "." if len(line.values) < 12 else None
    axis.plot(
        line.steps,
        smooth(line.values) if is_noisy else line.values,
        color=colour,
        marker=marker,
        linewidth=1.7,
    )


def _legend(figure, axes, colours: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
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
