"""Decides whether this process does the work of `train` or `resume`, or supervises one that does.
Other verbs that run components work in a fork (see `watched_fork`)."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rlcli.cli.output import keep_stdout_for_results
from rlcli.launch import lifeline
from rlcli.processes import keep_private

WHOLE_PROCESS = "whole process"
"""Set in a command's context if the process was started only for this command."""

NoSupervisor = Annotated[
    bool,
    typer.Option(
        "--no-supervisor",
        help="Train in this process: no deadlines, no report if it dies.",
        hidden=True,  # for debugging; the help page of train fills a screen
    ),
]


def is_to_supervise(context: typer.Context, no_supervisor: bool) -> bool:
    """Whether a child of this process should do the work: not if this is that child, nor under a
    debugger, which would follow the wrong process."""
    if lifeline.attach() or no_supervisor or sys.gettrace() is not None:
        return False
    return _is_whole_process(context)


def keep_run_private(context: typer.Context) -> None:
    """Give everything that the run writes from now on to its owner alone, if this process is only
    for this command."""
    if _is_whole_process(context):
        keep_private()


def keep_json_apart(context: typer.Context, as_json: bool) -> None:
    """In the process that trains, if it is only for this command: what components print does not
    mix with the JSON document, if there is one."""
    if as_json and _is_whole_process(context):
        keep_stdout_for_results()


def _is_whole_process(context: typer.Context) -> bool:
    return bool((context.obj or {}).get(WHOLE_PROCESS))


def supervise(context: typer.Context, quiet: bool, as_json: bool, in_job: bool = False) -> int:
    """Run the command in a child. Returns its exit code;
    raises RlcliError if it did not end by itself."""
    from rlcli.launch import supervisor

    options = context.parent.params if context.parent is not None else {}
    before = [
        *(["--debug"] if options.get("debug") else []),
        *(["--project", str(options["project"])] if options.get("project") else []),
    ]
    flags = {"--quiet": quiet, "--json": as_json, "--in-job": in_job}
    after = [option for option, is_given in flags.items() if is_given]
    return supervisor.supervise(lambda run: [*before, "resume", *after, "--", run])
