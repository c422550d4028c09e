"""`rlcli profile`: where the time of a step went."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.arguments import AsJson, RunName, RunsFolder
from rlcli.cli.output import print_json, print_table, print_text, wrapped
from rlcli.errors import ResourceError, UsageError
from rlcli.observe.run_search import RUNS, find_run, short_name

if TYPE_CHECKING:
    from rlcli.observe.critical_path import StepTrace
    from rlcli.observe.profile import ProfiledCall
    from rlcli.observe.step_profile import StepProfile


def profile(
    run: RunName,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="A step; default: the one of median duration."),
    ] = None,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> None:
    """Show the critical path of a step, what its ranks waited for, and what would make it shorter.

    The run's trace.json has the last steps (log.trace_steps), for https://ui.perfetto.dev. rlcli
    train --profile N traces the operations inside calls.

    Example: rlcli profile runs/ppo_math/20260412-093011
    """
    from rlcli.observe.critical_path import steps_of
    from rlcli.observe.profile import read_calls
    from rlcli.observe.step_profile import profile_of_step
    from rlcli.observe.trace import TRACE, read_trace

    folder = find_run(run, runs)
    trace = read_trace(folder)
    steps = steps_of(trace) if trace is not None else []
    if not steps:
        raise ResourceError(
            f"{folder} has no timeline of its steps",
            hint="it is written after the first step, unless log.trace_steps is 0",
            code="F72",
        )
    chosen, calls = profile_of_step(_chosen(steps, step)), read_calls(folder)
    if as_json:
        numbers, operations = [each.number for each in steps], [asdict(call) for call in calls]
        print_json(asdict(chosen) | {"steps": numbers, "operations": operations})
        return
    _print(chosen, short_name(folder, runs), steps, is_median=step is None)
    _print_operations(calls)
    print_text(f"timeline: {folder / TRACE}, for https://ui.perfetto.dev")


def _chosen(steps: Sequence[StepTrace], number: int | None) -> StepTrace:
    """Raises UsageError if there is no such step."""
    from rlcli.observe.critical_path import median_step

    if number is None:
        return median_step(steps)
    numbers = {step.number: step for step in steps}
    if number not in numbers:
        raise UsageError(
            f"the timeline has no step {number}",
            hint=f"it has steps {min(numbers)} to {max(numbers)}",
        )
    return numbers[number]


def _print(profile: StepProfile, run: str, steps: Sequence[StepTrace], *, is_median: bool) -> None:
    from rlcli.observe.series import short

    median = f", the median of {len(steps)} steps" if is_median and len(steps) > 1 else ""
    print_text(f"{run} · step {profile.step}{median}: {short(profile.seconds)} s")
    print_text()
    path = [
        (row.call, _rank(row.rank), short(row.seconds), f"{row.share:.0%}") for row in profile.path
    ]
    print_table(("critical path", "rank", "seconds", "share"), path, numbers=True)
    print_text()
    for line in _waits(profile):
        print_text(line)
    print_text()
    for sentence in profile.advice:
        print_text(wrapped(sentence))
    print_text()


def _waits(profile: StepProfile) -> Iterator[str]:
    """What ranks wait for, a line for those that run the same calls."""
    from rlcli.observe.step_profile import SMALL, ranks_text, seconds_text

    for of in profile.waits:
        longest = [
            f"{seconds_text(seconds, profile.seconds)} {reason}"
            for reason, seconds in of.seconds.items()
            if seconds >= SMALL * profile.seconds
        ]
        if longest:
            waits = "waits" if len(of.ranks) == 1 else "wait"
            yield wrapped(f"{ranks_text(of.ranks)} {waits} {', '.join(longest)}", rest="  ")


def _rank(rank: int | None) -> str:
    return "-" if rank is None else str(rank)


def _print_operations(calls: Sequence[ProfiledCall]) -> None:
    """The table of operations, if some steps were traced by torch's profiler."""
    from rlcli.observe.profile import profile_table
    from rlcli.observe.terminal import open_console, speaks_unicode

    if calls:
        console = open_console(sys.stdout)
        console.print(profile_table(calls, console.is_terminal and speaks_unicode(console)))
