"""`rlcli status`: the state of all runs, or the details of one."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.arguments import AsJson, RunsFolder, overview_of
from rlcli.cli.output import (
    print_described,
    print_entries,
    print_json,
    print_styled,
    print_talk,
    print_text,
    speaks_unicode,
)
from rlcli.observe.run_search import RUNS, find_runs, short_name
from rlcli.observe.series import clock_time, short, sparkline
from rlcli.units import age, count

if TYPE_CHECKING:
    from rlcli.observe.progress import Progress
    from rlcli.observe.run_overview import Overview

SHOWN = 20
"""Number of runs that are listed, unless all are requested."""
CURVE_WIDTH = 40


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="One run, in detail: its folder or name; default: all."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help=f"List more than the last {SHOWN} runs.")
    ] = False,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> None:
    """Show the state of runs: step, last reward or loss, and where they run.

    A run that claims to be running but has no processes is reported as died.

    Example: rlcli status
    """
    if run is not None:
        overview = overview_of(run, runs)
        progress = _progress(overview)
        if as_json:
            print_json(as_document(overview) | _details(overview, progress))
        else:
            _print_one(overview, progress, runs)
        return
    from rlcli.launch.run_jobs import with_jobs
    from rlcli.observe.run_overview import read_overview

    folders = find_runs(runs)
    shown = folders if every else folders[:SHOWN]
    overviews = with_jobs(
        [overview for overview in map(read_overview, shown) if overview is not None]
    )
    if as_json:
        print_json(
            {
                "runs": [as_document(overview) for overview in overviews],
                "left_out": len(folders) - len(shown),
            }
        )
    else:
        _print_all(overviews, len(folders) - len(shown), runs)


def _print_all(overviews: list[Overview], left_out: int, runs: Path) -> None:
    if not overviews:
        print_text(f"no runs in {runs}")
        return
    rows = []
    for overview in overviews:
        telling = (
            f"{overview.telling[0]} {short(overview.telling[1])}"
            if overview.telling is not None
            else "-"
        )
        old = f"{age(overview.age)} ago" if overview.age is not None else "-"
        rows.append(
            (
                short_name(overview.folder, runs),
                overview.state,
                overview.steps_done,
                telling,
                _where(overview),
                old,
            )
        )
    print_entries(["run", "state", "step", "last", "where", "updated"], rows)
    if left_out:
        print_talk(f"and {count(left_out, 'older run')}: --all")


def _where(overview: Overview) -> str:
    if overview.job is not None:
        return f"job {overview.job}{f' on {overview.nodes}' if overview.nodes else ''}"
    if overview.host is None:
        return "-"
    return "here" if overview.is_here else overview.host


def _progress(overview: Overview) -> Progress:
    """The progress of a run, from its metrics."""
    from rlcli.observe.replay import FollowedRun, progress_of

    records, _ = FollowedRun(overview.folder).refresh()
    return progress_of(overview, records)


def _print_one(overview: Overview, progress: Progress, runs: Path) -> None:
    code = f", exit code {overview.exit_code}" if overview.exit_code else ""
    head = (
        (short_name(overview.folder, runs), "bold"),
        ("  ", ""),
        (f"{overview.state}{code}", overview.style),
    )
    print_styled(*head, (f"  step {overview.steps_done}", ""))
    rows = _facts(overview, progress)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print_described(f"  {name:<{width}}  ", value)
    for command in _commands(overview):
        print_text(command)


def _facts(overview: Overview, progress: Progress) -> list[tuple[str, str]]:
    """The facts to show, one per line."""
    why = [("why", overview.message)] if overview.message else []
    return [
        *why,
        *_whereabouts(overview),
        *_learning(progress),
        *_headway(overview, progress),
    ]


def _whereabouts(overview: Overview) -> list[tuple[str, str]]:
    """The job, the machine and the processes of a run."""
    from rlcli.observe.run_overview import read_processes

    facts = []
    if overview.job is not None:
        nodes = f" on {overview.nodes}" if overview.nodes else ""
        facts.append(("job", f"{overview.job}{nodes}{_allocations(overview)}"))
    if overview.holder is not None:
        others = (
            f", supervisor {overview.holder.supervisor.pid}"
            if overview.holder.supervisor is not None
            else ""
        )
        facts.append(("where", f"{_machine(overview)}, pid {overview.holder.owner.pid}{others}"))
    processes = read_processes(overview.folder)
    if processes:
        facts.append(
            ("processes", ", ".join(f"{name} {process.pid}" for name, process in processes))
        )
    if overview.started:
        old = f", last update {age(overview.age)} ago" if overview.age is not None else ""
        facts.append(("started", f"{overview.started}{old}"))
    return facts


def _learning(progress: Progress) -> list[tuple[str, str]]:
    """The curves of training, and the results on held-out rows."""
    from rlcli.observe.progress import EVALUATED

    facts = []
    for name, values in progress.telling_curves():
        curve = sparkline(values, CURVE_WIDTH, ascii_only=not speaks_unicode())
        facts.append((name, f"{short(values[-1]):<7} {curve}"))
    for name in EVALUATED:
        if values := progress.evaluated(name):
            before = f"{short(values[0])} -> " if len(values) > 1 else ""
            facts.append((f"held-out {name}", f"{before}{short(values[-1])}"))
    return facts


def _headway(overview: Overview, progress: Progress) -> list[tuple[str, str]]:
    """How fast a run is, how often it was interrupted, and how far it is."""
    facts = []
    if progress.seconds_per_step is not None:
        rate = (
            f", {short(progress.tokens_per_second)} tokens/s"
            if progress.tokens_per_second is not None
            else ""
        )
        facts.append(("pace", f"{short(progress.seconds_per_step)} s per step{rate}"))
    if progress.restarts:
        counts = ", ".join(
            f"{group} {number}" for group, number in sorted(progress.restarts.items())
        )
        facts.append(("started again", counts))
    if overview.is_under_way and progress.eta is not None:
        facts.append(("time left", clock_time(progress.eta)))
    if (step := _committed(overview)) is not None:
        facts.append(("checkpoint", f"step {step}"))
    return facts


def _allocations(overview: Overview) -> str:
    """A summary of the allocations of a job that was requeued."""
    from rlcli.launch.slurm.allocations import read_allocations

    count = len(read_allocations(overview.folder))
    return f", started {count} times" if count > 1 else ""


def _machine(overview: Overview) -> str:
    return f"{overview.host} (this machine)" if overview.is_here else str(overview.host)


def _committed(overview: Overview) -> int | None:
    from rlcli.observe.run_record import read_committed

    committed = read_committed(overview.folder)
    return committed.step if committed is not None else None


def _commands(overview: Overview) -> list[str]:
    """The commands to type next, which look for runs in RUNS."""
    from rlcli.observe.run_logs import run_logs

    name = shlex.quote(short_name(overview.folder))
    if overview.is_under_way:
        return [f"follow it: rlcli attach {name}", f"stop it: rlcli stop {name}"]
    if overview.state == "done":
        return []
    # that of a run of one process (launch=inline) begins with what its calls print
    look = [f"look: rlcli logs {name}"] if run_logs(overview.folder) else []
    return [*look, f"continue: rlcli resume {shlex.quote(str(overview.folder))}"]


def as_document(overview: Overview) -> dict[str, Any]:
    """The JSON document for `--json`."""
    owner = overview.holder.owner if overview.holder is not None else None
    telling = overview.telling
    value = None if telling is None or not math.isfinite(telling[1]) else telling[1]
    return {
        "run": str(overview.folder),
        "state": overview.state,
        "step": overview.step,
        "steps": overview.steps,
        "last": {"name": telling[0], "value": value} if telling is not None else None,
        "host": overview.host,
        "job": overview.job,
        "nodes": overview.nodes,
        "is_here": overview.is_here,
        "pid": owner.pid if owner is not None else None,
        "started": overview.started,
        "seconds_since_update": overview.age,
        "exit_code": overview.exit_code,
        "message": overview.message,
    }


def _details(overview: Overview, progress: Progress) -> dict[str, Any]:
    from rlcli.observe.run_overview import read_processes

    finite = {key: value if math.isfinite(value) else None for key, value in overview.last.items()}
    return {
        "metrics": finite,
        "seconds_per_step": progress.seconds_per_step,
        "seconds_left": progress.eta if overview.is_under_way else None,
        "checkpoint": _committed(overview),
        "restarts": dict(progress.restarts),
        "supervisor": overview.holder.supervisor.pid
        if overview.holder is not None and overview.holder.supervisor
        else None,
        "processes": [
            {"name": name, **asdict(process)} for name, process in read_processes(overview.folder)
        ],
    }
