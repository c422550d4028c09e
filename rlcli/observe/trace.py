"""The timeline of the last steps of a run: `trace.json`, in Chrome's trace format, for `rlcli
profile`, `rlcli report` and https://ui.perfetto.dev.

The file is replaced as a whole, so it is valid at all times. Each event belongs to the step in
which it ended (`args.step`); those of the oldest steps leave the file first.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcli.api.timing import TimeSpan
from rlcli.files import known_object, replace_file

TRACE = "trace.json"
"""File of a run."""
MASTER = 1_000_000
"""Number of the master among the processes; those of ranks are their own."""
STEPS = "steps"
"""Track of the master with the steps themselves."""
STEP = "step"
"""Kind of such a span."""
MOST_BYTES = 32 << 20
"""Of a file; the newest step is always in it."""
WRITING_SHARE = 200
"""A file is written at most once in so many times the seconds that writing it takes."""

Track = tuple[int, str]
"""A process, and the name of one of its tracks."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A span of a process of the run. Times are seconds since the run began."""

    process: int
    span: TimeSpan
    of: str = ""
    """What a call works on: `step 3`."""
    cause: str = ""
    """Of a wait: the call that it waits for."""

    @property
    def track(self) -> Track:
        return self.process, self.span.track


@dataclass(frozen=True)
class Trace:
    """The steps of a file."""

    began: float
    """When the run began, in seconds since 1970."""
    steps: Mapping[int, Sequence[Traced]]
    """Step, counted from 1 → what ended in it."""
    clocks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Node → how far its clock is ahead of the master's, and the largest error of that."""


def event_line(name: str, kind: str, began: float, seconds: float, **fields: Any) -> str:
    """A complete event of the format; `fields`: at least pid and tid."""
    times = {"ts": round(began * 1e6, 3), "dur": round(seconds * 1e6, 3)}
    return json.dumps(
        {"ph": "X", "name": name, "cat": kind, **times, **fields}, separators=(",", ":")
    )


class Tracks:
    """Numbers of tracks. What overlaps on a track is divided among several of them, as viewers draw
    what is nested only."""

    def __init__(self) -> None:
        self.numbers: dict[Track, int] = {}
        self._ends: defaultdict[Track, list[float]] = defaultdict(list)
        """Track → when the last span has ended on each of the tracks among which it is divided."""

    def free(self, track: Track, began: float, ended: float) -> Track:
        """The first of several tracks of a name that is free from `began` on; it is taken until
        `ended`."""
        ends = self._ends[track]
        number = next((number for number, end in enumerate(ends) if end <= began), len(ends))
        ends[number:] = [ended, *ends[number + 1 :]]
        process, name = track
        return process, f"{name} ({number + 1})" if number else name

    def number(self, track: Track) -> int:
        return self.numbers.setdefault(track, len(self.numbers) + 1)


class TraceFile:
    """The file, and the steps that are in it."""

    def __init__(self, folder: Path, most_steps: int, step: int = 0):
        """`most_steps`: how many steps are kept. The file of a run that is resumed after `step` has
        the steps up to it."""
        self._path = folder / TRACE
        self._most_steps = most_steps
        self._tracks = Tracks()
        self._steps: dict[int, bytes] = {}
        earlier = read_trace(folder) if step else None
        self.began = earlier.began if earlier is not None else time.time()
        self._zero = time.monotonic() - (time.time() - self.began)
        """When the run began, by this process's clock."""
        self.clocks: Mapping[str, Mapping[str, float]] = {}
        self._next_writing = 0.0
        self._is_changed = False
        for number, traced in earlier.steps.items() if earlier is not None else ():
            if number <= step:
                self._steps[number] = self._lines(number, traced, zero=0.0)

    def free_track(self, track: Track, began: float, ended: float) -> str:
        """The name of the track on which something is drawn; times by this process's clock."""
        return self._tracks.free(track, began, ended)[1]

    def add(self, step: int, traced: Iterable[Traced]) -> None:
        """Add what ended in a step, with times by this process's clock; write the file, unless it
        was written just now."""
        if not self._most_steps:
            return
        self._steps[step] = self._lines(step, traced, self._zero)
        self._is_changed = True
        while len(self._steps) > 1 and self._is_too_large:
            del self._steps[min(self._steps)]
        if time.monotonic() >= self._next_writing:
            self.write()

    def write(self) -> None:
        """Write what was added. A disk that is full costs the timeline, not the run."""
        if not self._is_changed:
            return
        began = time.monotonic()
        try:
            replace_file(self._path, self._content())
            self._is_changed = False
        except OSError:
            pass
        ended = time.monotonic()
        self._next_writing = ended + WRITING_SHARE * (ended - began)

    @property
    def _is_too_large(self) -> bool:
        size = sum(map(len, self._steps.values()))
        return len(self._steps) > self._most_steps or size > MOST_BYTES

    def _lines(self, step: int, traced: Iterable[Traced], zero: float) -> bytes:
        return ",\n".join(self._line(step, each, zero) for each in traced).encode()

    def _line(self, step: int, traced: Traced, zero: float) -> str:
        span = traced.span
        args: dict[str, Any] = {"step": step}
        if traced.of:
            args["of"] = traced.of
        if traced.cause:
            args["for"] = traced.cause
        track = {"pid": traced.process, "tid": self._tracks.number(traced.track)}
        return event_line(span.name, span.kind, span.began - zero, span.seconds, **track, args=args)

    def _content(self) -> bytes:
        described = {"began": self.began, "clocks": self.clocks}
        head = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(described)},"traceEvents":[\n'
        names = ",\n".join(_names(self._tracks.numbers)).encode()
        events = [names, *(lines for lines in self._steps.values() if lines)]
        return head.encode() + b",\n".join(events) + b"\n]}\n"


def _names(tracks: Mapping[Track, int]) -> Iterator[str]:
    """Events that name processes and tracks, and put the master first."""
    for process in dict.fromkeys(process for process, _ in tracks):
        is_master = process == MASTER
        name = "master" if is_master else f"rank {process}"
        order = -1 if is_master else process
        yield _about("process_name", process, 0, {"name": name})
        yield _about("process_sort_index", process, 0, {"sort_index": order})
    for (process, name), number in tracks.items():
        yield _about("thread_name", process, number, {"name": name})
        yield _about("thread_sort_index", process, number, {"sort_index": number})


def _about(aspect: str, process: int, track: int, args: Mapping[str, Any]) -> str:
    """An event that describes a track, or a process."""
    return json.dumps({"ph": "M", "name": aspect, "pid": process, "tid": track, "args": args})


# -- reading ---------------------------------------------------------------------------------------


def read_trace(run: Path) -> Trace | None:
    """The trace of a run; None if there is none that can be read. Events that are not ours are left
    out."""
    content = known_object(run / TRACE, 2 * MOST_BYTES)
    events, described = content.get("traceEvents"), content.get("otherData")
    if not isinstance(events, list) or not isinstance(described, dict):
        return None
    try:
        return _read(events, described)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _read(events: Sequence[Mapping[str, Any]], described: Mapping[str, Any]) -> Trace:
    names = {
        (each["pid"], each["tid"]): str(each["args"]["name"])
        for each in events
        if each["name"] == "thread_name"
    }
    steps: defaultdict[int, list[Traced]] = defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            steps[int(each["args"]["step"])].append(_traced(each, names))
    clocks = described["clocks"]
    return Trace(float(described["began"]), dict(sorted(steps.items())), clocks)


def _traced(fields: Mapping[str, Any], names: Mapping[tuple[int, int], str]) -> Traced:
    process, args = int(fields["pid"]), fields["args"]
    began = float(fields["ts"]) / 1e6
    track = names[process, fields["tid"]]
    ended = began + float(fields["dur"]) / 1e6
    span = TimeSpan(str(fields["name"]), str(fields["cat"]), began, ended, track)
    return Traced(process, span, str(args.get("of", "")), str(args.get("for", "")))
