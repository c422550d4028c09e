"""The most important metrics of a run, their names in the records,
and how to format them briefly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

NAMES: dict[str, tuple[str, ...]] = {
    "reward": ("task_reward", "reward", "mean_reward", "reward_mean"),
    "kl": ("kl_to_reference", "ref_kl", "kl_ref", "reference_kl", "kl", "mean_kl"),
    "length": (
        "response_length",
        "response_len",
        "response_tokens",
        "mean_response_length",
        "length",
    ),
    "staleness": ("staleness",),
    "loss": ("loss", "actor_loss", "policy_loss"),
    "accuracy": ("accuracy", "token_accuracy"),
    "grad norm": ("grad_norm",),
    "learning rate": ("lr", "learning_rate"),
}
"""Names of a curve in the records: `<role>/<name>` for one of these names, the first one found."""

SIDE_KEYS = ("time/", "bytes/", "perf/", "eval/")

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
HUGE = 1e200
"""Drawn instead of any larger value, so that sums and differences of a diverged curve stay
finite."""


def number(value: Any) -> float | None:
    """The value as a float, None if it is not a number (booleans are not)."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def find_key(keys: Iterable[str], curve: str) -> str | None:
    """The key of the records that holds a curve of NAMES."""
    ours = [key for key in keys if not key.startswith(SIDE_KEYS)]
    for name in NAMES[curve]:
        for key in ours:
            if key.rpartition("/")[2] == name:
                return key
    return None


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and finite values of one key, for the records that have it."""
    steps, values = [], []
    for position, record in enumerate(records):
        value = number(record.get(key))
        if value is not None and math.isfinite(value):
            steps.append(
                number(record.get("step")) or float(position if "step" not in record else 0)
            )
            values.append(value)
    return steps, values


def seconds_of(record: Mapping[str, Any]) -> float:
    """How long a step took, with the checkpoint before it and the evaluation after it."""
    times = (number(record.get(f"time/{phase}")) for phase in ("checkpoint", "step", "eval"))
    return sum(time for time in times if time is not None and math.isfinite(time))


def curve(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a curve of NAMES, both empty if the run does not have it."""
    key = find_key(dict.fromkeys(key for record in records for key in record), name)
    return series(records, key) if key is not None else ([], [])


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """A curve as one line of text, at most `width` wide;
    each character is the mean of its interval."""
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    finite = [max(-HUGE, min(HUGE, value)) for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    points = _shrink(finite, width)
    low, high = min(points), max(points)
    if high == low:
        return blocks[0] * len(points)
    scale = (len(blocks) - 1) / (high - low)
    return "".join(blocks[round((point - low) * scale)] for point in points)


def _shrink(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def thinned(values: Sequence[float], most: int) -> Sequence[float]:
    """At most so many numbers, means of neighbours. The first and the last stay."""
    if len(values) <= most:
        return values
    inner = values[1:-1]
    edges = [index * len(inner) // (most - 2) for index in range(most - 1)]
    means = [sum(inner[start:end]) / (end - start) for start, end in pairwise(edges)]
    return [values[0], *means, values[-1]]


def short(value: float) -> str:
    """About three digits: 0.612, 34.2, 842, 25.3k, 1.0e-06."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 999_500:
        return f"{value:.2e}" if size >= 999.95e6 else f"{value / 1e6:.1f}M"
    if size >= 9_999.5:
        return f"{value / 1e3:.1f}k"
    for least, digits in ((99.95, 0), (9.995, 1), (0.9995, 2), (0.1, 3), (0.001, 4)):
        if size >= least:
            return f"{value:.{digits}f}"
    return f"{value:.1e}" if size else "0"


def clock_time(seconds: float) -> str:
    """4:32, 1:04:32, or 2d 03:00."""
    total = max(0, round(seconds))
    minutes, hours, days = total // 60 % 60, total // 3600 % 24, total // 86400
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"
