"""What `train` and `resume` share: whether this process does the work, or watches one that does."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rlcli.launch import lifeline

WHOLE_PROCESS = "whole process"
"""Set in a command's context if the process was started for this command alone."""

NoSupervisor = Annotated[
    bool, typer.Option("--no-supervisor", help="Train in this process: no deadlines, no report if it dies.")
]


def is_to_supervise(context: typer.Context, no_supervisor: bool) -> bool:
    """Whether the work is to be done by a child of this process: not if we are that child, nor under a debugger, which
    would follow the wrong one."""
    if lifeline.attach() or no_supervisor or sys.gettrace() is not None:
        return False
    return bool((context.obj or {}).get(WHOLE_PROCESS))


def supervise(context: typer.Context, quiet: bool, as_json: bool) -> int:
    """Have the command done by a child. Returns its exit code; raises RlcliError if it did not end by itself."""
    from rlcli.launch import supervisor

    options = context.parent.params if context.parent is not None else {}
    before = [
        *(["--debug"] if options.get("debug") else []),
        *(["--project", str(options["project"])] if options.get("project") else []),
    ]
    after = [*(["--quiet"] if quiet else []), *(["--json"] if as_json else [])]
    return supervisor.supervise(lambda run: [*before, "resume", *after, "--", run])
