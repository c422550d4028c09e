"""The learning curve of a run as one PNG of four panels: reward, held-out accuracy, KL,
response length."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.files import replace_file
from rlcli.observe.json_lines import Warn
from rlcli.observe.series import curve, series, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

DPI = 120
WIDTH = 10.0
ROW_HEIGHT = 3.3
"""Inches; 2x2 panels give 1200 x 792 pixels."""

MOST_POINTS = 2_000
"""Points of a smooth line."""
INK, FAINT, ACCENT = "#1f4e79", "#9dbad5", "#c8553d"


@dataclass(frozen=True)
class Panel:
    """One panel of the figure: finite values over steps."""

    title: str
    steps: list[float]
    values: list[float]
    points: bool = False
    """A few measured points (an evaluation), joined; otherwise a noisy curve that is smoothed."""
    fraction: bool = False
    """The values are fractions between 0 and 1."""
    exact: bool = False
    """Set, not measured: nothing to smooth."""


def plot_curves(
    records: Sequence[Mapping[str, Any]], path: Path, title: str, warn: Warn = log.warning
) -> Path | None:
    """Draw up to four panels of a run's records into `path`;
    None if there is nothing to draw or it fails."""
    panels = choose_panels(records)
    if not panels:
        return None
    try:
        replace_file(path, _draw(panels, title))
    except Exception as error:
        warn(f"the learning curve is not drawn: {error or type(error).__name__}")
        return None
    return path


def choose_panels(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The four most informative series of the run, those of reinforcement learning if it has
    rewards."""
    reward = Panel("Reward", *curve(records, "reward"))
    evaluated = _evaluations(records)
    measured = {
        name: Panel(heading, *curve(records, name), exact=name == "learning rate")
        for name, heading in HEADINGS.items()
    }
    responses = [measured["kl"], measured["length"]]
    if reward.values:
        panels = [reward, *evaluated[:1], *responses, *evaluated[1:], measured["loss"]]
    else:
        panels = [measured["loss"], measured["accuracy"], *evaluated, *responses]
    panels += [measured["grad norm"], measured["learning rate"]]
    return [panel for panel in panels if panel.values][:4]


def _evaluations(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The results on held-out rows that the run has, the most telling first."""
    panels = [
        Panel(
            "Accuracy on held-out problems",
            *series(records, "eval/accuracy"),
            points=True,
            fraction=True,
        ),
        Panel("Reward on held-out problems", *series(records, "eval/reward"), points=True),
        Panel("Loss on held-out data", *series(records, "eval/loss"), points=True),
    ]
    return [panel for panel in panels if panel.values]


HEADINGS = {
    "kl": "KL from the reference",
    "length": "Response length (tokens)",
    "loss": "Loss",
    "accuracy": "Accuracy in training",
    "grad norm": "Gradient norm",
    "learning rate": "Learning rate",
}


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving mean over about a twelfth of the run. The window shrinks towards both ends,
    where the line thus begins and ends on a value."""
    reach = max(1, len(values) // 24)
    result = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        window = values[index - near : index + near + 1]
        result.append(sum(window) / len(window))
    return result


def smooth_line(
    steps: Sequence[float], values: Sequence[float]
) -> tuple[Sequence[float], Sequence[float]]:
    """The points of a smooth line: no more than a picture can show, as each is a mean of many."""
    return thinned(steps, MOST_POINTS), smooth(thinned(values, MOST_POINTS))


def draw_panels(
    titles: Sequence[str],
    title: str,
    draw: Callable[[int, Axes], tuple[float, float]],
    more_height: float = 0.0,
    finish: Callable[[Figure], None] | None = None,
) -> bytes:
    """A figure with a panel for each of `titles`, as PNG bytes. `draw(number, axis)` fills a panel
    and returns its first and last step; `finish` adds what is around the panels, for which there
    are `more_height` inches.

    It is a Figure of its own: pyplot would keep it and might look for a screen. No text is parsed
    as mathematics, because names come from files.
    """
    columns = min(2, len(titles))
    rows = (len(titles) + columns - 1) // columns
    figure = _figure(ROW_HEIGHT * rows + more_height)
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    drawn = axes[: len(titles)]
    spans = []
    for number, (axis, heading) in enumerate(zip(drawn, titles, strict=True)):
        _style(axis, heading)
        spans.append(draw(number, axis))
    _set_steps(drawn, spans)
    for axis in axes[len(titles) :]:
        axis.set_axis_off()
    if finish is not None:
        finish(figure)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _figure(height: float) -> Figure:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    return figure


def _style(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, parse_math=False)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, color="#888888")
    axis.set_xlabel("step", fontsize=9)


def _set_steps(axes: Sequence[Axes], spans: Sequence[tuple[float, float]]) -> None:
    """Have all axes of steps begin and end with the data, and name both ends."""
    first, last = min(first for first, _ in spans), max(last for _, last in spans)
    margin = (last - first) * 0.02 or 0.5
    for axis in axes:
        axis.set_xlim(first - margin, last + margin)
        axis.set_xticks(step_ticks(first, last))


def step_ticks(first: float, last: float) -> list[float]:
    """The steps to name on an axis: both ends, and round ones that are not close to them."""
    from matplotlib.ticker import MaxNLocator

    if first == last:
        return [first]
    between = MaxNLocator(nbins=6, integer=True).tick_values(first, last)
    room = (last - first) * 0.08
    round_ones = (float(tick) for tick in between if first + room < tick < last - room)
    return [first, *round_ones, last]


def _draw(panels: Sequence[Panel], title: str) -> bytes:
    """PNG bytes."""

    def draw(number: int, axis: Axes) -> tuple[float, float]:
        _draw_panel(axis, panels[number])
        return min(panels[number].steps), max(panels[number].steps)

    return draw_panels([panel.title for panel in panels], title, draw)


def _draw_panel(axis: Axes, panel: Panel) -> None:
    if panel.points:
        _draw_points(axis, panel)
    elif panel.exact or len(panel.values) < 12:
        marker = "." if len(panel.values) < 12 else None
        axis.plot(panel.steps, panel.values, color=INK, marker=marker, linewidth=1.5)
    else:
        axis.plot(panel.steps, panel.values, color=FAINT, linewidth=0.9)
        axis.plot(*smooth_line(panel.steps, panel.values), color=INK, linewidth=1.8)
    if panel.fraction:
        axis.set_ylim(0, 1.02)


def _draw_points(axis: Axes, panel: Panel) -> None:
    """Draw the points, joined, and name the values of the first and the last one."""
    line: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.5, "clip_on": False}
    axis.plot(panel.steps, panel.values, color=ACCENT, **line)
    for index in sorted({0, len(panel.values) - 1}):
        step, value = panel.steps[index], panel.values[index]
        below = panel.fraction and value > 0.85
        placement: dict[str, Any] = {"textcoords": "offset points", "ha": "center"}
        placement["xytext"] = (0, -13 if below else 7)
        axis.annotate(f"{value:.3g}", (step, value), fontsize=8, color=ACCENT, **placement)
    axis.margins(y=0.15)
