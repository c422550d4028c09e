"""A run's output on stderr: a live display on a terminal, plain lines everywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rlcli.api.headway import Count
from rlcli.errors import escape_control
from rlcli.observe.progress import EVALUATED, Progress
from rlcli.observe.series import clock_time, short
from rlcli.observe.status_line import SILENCE, StatusLine, StatusLog, can_redraw
from rlcli.observe.terminal import PatientStream, one_line, short_path

EVENTS = "RLCLI_EVENTS"
"""Environment variable with the descriptor of a pipe to which the events of the display are
written, for another program that shows them itself."""


class Display(Protocol):
    """Receives events from the master. Leaving its context, also by an error,
    restores the terminal."""

    def start(
        self, run_name: str, run_dir: os.PathLike[str] | str, steps: int, title: str = "step"
    ) -> None:
        """A run of `steps` steps begins (0: unknown); a second call begins the next run of a chain.

        The title precedes the step count: "step" or "warm start sft_math".
        """

    def take_up(self, progress: Progress) -> None:
        """Continue from the known progress of the run that has begun, instead of from nothing."""

    def phase(self, text: str) -> None:
        """The current activity: "loading actor", "actor_gen". May be called before `start`."""

    def count(self, count: Count, of: str = "") -> None:
        """So much is done of a phase, by default of the current one."""

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is done; `record` is its line of metrics.jsonl."""

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """An evaluation after this step is done; names with or without `eval/`."""

    def note(self, text: str) -> None:
        """One line worth keeping."""

    def warning(self, text: str) -> None:
        """One line that somebody should act on."""

    def finish(self, summary: str | None = None) -> None:
        """The run is over; the summary is its last line."""

    def stop(self) -> None:
        """Restore the terminal. May be called at any time, and more than once."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_display(quiet: bool = False, stream: TextIO | None = None) -> Display:
    """The live display if the stream (default stderr) is a terminal that can redraw, else plain
    lines; for a program that has started this command, what it asks for."""
    if stream is None and (pipe := os.environ.pop(EVENTS, None)) is not None:
        from rlcli.observe.events import EventDisplay

        return EventDisplay(int(pipe))
    stream = stream or sys.stderr
    if quiet or not can_redraw(stream):
        return PlainDisplay(stream, quiet=quiet)
    from rlcli.observe.live import LiveDisplay
    from rlcli.observe.terminal import open_console

    console = open_console(stream)
    return LiveDisplay(console, setting_up=StatusLine(lambda: console))


class PlainDisplay:
    """One line every few steps, for logs and pipes: about twenty lines per run,
    more if steps are slow."""

    LINES_PER_RUN = 20
    SHORTEST_GAP = 1.0

    def __init__(
        self, stream: TextIO, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ):
        """`quiet`: print warnings only."""
        self._stream = PatientStream(stream)
        self._quiet = quiet
        self._clock = clock
        self._progress: Progress | None = None
        self._log = StatusLog(self.note, clock)
        self._printed = (-float("inf"), 0)
        """Time at which the last line of a step was printed, and its step."""

    def start(
        self, run_name: str, run_dir: os.PathLike[str] | str, steps: int, title: str = "step"
    ) -> None:
        self._progress = Progress(one_line(title), steps, self._clock)
        self._printed = (-float("inf"), 0)
        self.note(f"run {run_name} -> {one_line(short_path(run_dir))}")

    def take_up(self, progress: Progress) -> None:
        progress.title = self._need_progress().title
        self._progress = progress
        if progress.done:
            self._printed = (self._clock(), progress.done)
            self.note(step_line(progress))

    def phase(self, text: str) -> None:
        """Print nothing: too short-lived for a log."""
        self._log.phase(text)

    def count(self, count: Count, of: str = "") -> None:
        self._log.count(count, of)

    def step(self, record: Mapping[str, Any]) -> None:
        progress = self._need_progress()
        progress.step(record)
        if self._is_due(progress):
            self._printed = (self._clock(), progress.done)
            self.note(step_line(progress))

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        results = self._need_progress().evaluation(step, record)
        self.note(evaluation_line(step, results))

    def note(self, text: str) -> None:
        if not self._quiet:
            self._say(text)

    def warning(self, text: str) -> None:
        self._say(f"warning: {text}")

    def finish(self, summary: str | None = None) -> None:
        if summary:
            self.note(summary)

    def stop(self) -> None:
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _is_due(self, progress: Progress) -> bool:
        when, step = self._printed
        silence = self._clock() - when
        if progress.done <= 1 or (progress.steps and progress.done >= progress.steps):
            return True
        is_turn = progress.done - step >= progress.steps // self.LINES_PER_RUN
        return silence >= SILENCE or (is_turn and silence >= self.SHORTEST_GAP)

    def _need_progress(self) -> Progress:
        if self._progress is None:
            raise RuntimeError("a display must be started before it counts steps")
        return self._progress

    def _say(self, text: str) -> None:
        self._log.note_output()
        self._stream.write(f"{escape_control(text)}\n")
        self._stream.flush()


def step_line(progress: Progress) -> str:
    """`step 120/400  reward 0.612  kl 0.0120  length 34.2  2.1 s/step  2.5k tok/s  eta 7:40`."""
    of = f"/{progress.steps}" if progress.steps else ""
    parts = [f"{progress.title} {progress.done}{of}"]
    parts += [f"{name} {short(values[-1])}" for name, values in progress.telling_curves()]
    if progress.seconds_per_step is not None:
        parts.append(f"{short(progress.seconds_per_step)} s/step")
    if progress.tokens_per_second is not None:
        parts.append(f"{short(progress.tokens_per_second)} tok/s")
    if progress.eta is not None and progress.done < progress.steps:
        parts.append(f"eta {clock_time(progress.eta)}")
    return "  ".join(parts)


def evaluation_line(step: int, results: Mapping[str, float]) -> str:
    """`evaluation at step 100: accuracy 0.870  reward 0.870`, the most important first."""
    names = sorted(
        results, key=lambda name: EVALUATED.index(name) if name in EVALUATED else len(EVALUATED)
    )
    return f"evaluation at step {step}: " + "  ".join(
        f"{name} {short(results[name])}" for name in names
    )
