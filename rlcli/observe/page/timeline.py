"""The timelines of a page: what each rank did in some steps of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.observe.critical_path import StepTrace, critical_path, median_step, steps_of
from rlcli.observe.step_profile import profile_of_step
from rlcli.observe.trace import MASTER, Traced, Track, read_trace

MOST_STEPS = 6
MOST_TRACKS = 40
MOST_SPANS = 1_500
"""Of a step: the longest ones."""

Document = dict[str, Any]


def timeline_of(run: Path) -> Document | None:
    """The last steps of a run and the one that is shown first, that of median duration; None if
    there is no timeline."""
    trace = read_trace(run)
    steps = steps_of(trace) if trace is not None else []
    if not steps:
        return None
    shown = median_step(steps)
    chosen = {step.number: step for step in [*steps[1 - MOST_STEPS :], shown]}
    return {
        "shown": shown.number,
        "steps": [_step(chosen[number]) for number in sorted(chosen)],
    }


def _step(step: StepTrace) -> Document:
    """A step: times are seconds since it began, those of spans beyond it are cut."""
    drawn = [each for each in step.traced if each.process != MASTER]
    tracks = _tracks(step, drawn)
    path = [
        [stretch.name, stretch.kind, *_times(step, stretch.began, stretch.ended), ""]
        for stretch in critical_path(step)
    ]
    return {
        "step": step.number,
        "seconds": step.seconds,
        "path": path,
        "tracks": [
            {"rank": rank, "name": name, "spans": _spans(step, of_track)}
            for (rank, name), of_track in tracks.items()
        ],
        "left_out": len(drawn) - sum(map(len, tracks.values())),
        "advice": profile_of_step(step).advice,
    }


def _tracks(step: StepTrace, drawn: Sequence[Traced]) -> dict[Track, list[Traced]]:
    """The longest spans on the first tracks, those of calls first on each rank."""
    longest = sorted(drawn, key=lambda each: -step.inside(each.span))[:MOST_SPANS]
    tracks: defaultdict[Track, list[Traced]] = defaultdict(list)
    for each in sorted(longest, key=lambda each: (each.span.began, -each.span.ended)):
        tracks[each.track].append(each)
    ordered = sorted(tracks, key=lambda track: (track[0], track[1] != "calls", track[1]))
    return {track: tracks[track] for track in ordered[:MOST_TRACKS]}


def _spans(step: StepTrace, traced: Sequence[Traced]) -> list[list[Any]]:
    """Name, kind, beginning, duration, and what it works on."""
    return [
        [
            each.span.name,
            each.span.kind,
            *_times(step, each.span.began, each.span.ended),
            each.of,
        ]
        for each in traced
    ]


def _times(step: StepTrace, began: float, ended: float) -> tuple[float, float]:
    first, last = max(began, step.window.began), min(ended, step.window.ended)
    return round(first - step.window.began, 4), round(last - first, 4)
