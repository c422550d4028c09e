"""`rlcli stop`: end a run, with a checkpoint if possible."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.api.headway import doing
from rlcli.cli.arguments import AsJson, RunName, RunsFolder, overview_of
from rlcli.cli.output import print_json, print_talk, print_text
from rlcli.cli.status import as_document
from rlcli.observe.run_search import RUNS

if TYPE_CHECKING:
    from rlcli.observe.run_overview import Overview


def stop(
    run: RunName,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the current step; its work is lost.")
    ] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            help="Then stop as with --now [a minute and 3 steps, and while it saves].",
        ),
    ] = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Only ask it to stop after the current step.")
    ] = False,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> None:
    """Stop a run after its current step, with a checkpoint; if it does not stop in time, end it.

    Only processes that the run has recorded on this machine are signalled.

    Example: rlcli stop runs/ppo_math/20260412-093011
    """
    from rlcli.launch.run_jobs import stop_job
    from rlcli.launch.stop_run import StopPatience, stop_here

    before = overview_of(run, runs, is_running=True)
    how = "was not running"
    if before.is_under_way:
        patience = (
            StopPatience(_grace(before), before.folder) if grace is None else StopPatience(grace)
        )
        end = stop_here if before.job is None else stop_job
        with doing(f"waiting for {run} to end"):
            has_stopped = end(
                before, at_once=now, patience=patience, wait=not no_wait, say=print_talk
            )
        how = "asked to stop" if no_wait else "stopped" if has_stopped else "ended at once"
    after = overview_of(str(before.folder), runs)
    if as_json:
        print_json(as_document(after) | {"how": how})
    else:
        _print(after, how)


def _grace(run: Overview) -> float:
    from rlcli.launch.stop_run import STEPS, grace_of
    from rlcli.observe.metrics import records_of
    from rlcli.observe.tail import Tail

    return grace_of(records_of(Tail(run.folder / "metrics.jsonl").last(STEPS)))


def _print(after: Overview, how: str) -> None:
    state = "" if how == "asked to stop" else f": {after.state}"
    print_text(f"{after.folder} {how}{state} at step {after.steps_done}")
    if not after.is_under_way and after.state != "done":
        print_text(f"to continue: rlcli resume {shlex.quote(str(after.folder))}")
