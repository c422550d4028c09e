"""Decides whether this process does the work, or watches one that does.

`train` and `resume` have a supervisor. Other verbs that run components work in a fork, so that a
component that calls `os._exit(0)` is not mistaken for completed work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Annotated

import typer

from rlcli.errors import WorkerError
from rlcli.launch import lifeline
from rlcli.processes import STOP_SIGNALS, die_with_parent, keep_private

WHOLE_PROCESS = "whole process"
"""Set in a command's context if the process was started only for this command."""

WATCHED = ("check", "tokens", "test", "eval", "generate")
"""Verbs that work in a fork."""

_verdict: tuple[int, int] | None = None
"""In such a fork: the descriptor for its exit code, and its process,
because copies of it must not write there."""

NoSupervisor = Annotated[
    bool,
    typer.Option(
        "--no-supervisor", help="Train in this process: no deadlines, no report if it dies."
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


def watch_fork() -> int | None:
    """Continue in a fork of this process. Returns None in the fork and, once it has ended,
    its exit code here.

    Raises WorkerError if it ended without `report_verdict`.
    """
    global _verdict
    reading, writing = os.pipe()
    awaited, parent = {signal.SIGINT, signal.SIGCHLD}, os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    if (fork := os.fork()) == 0:
        os.close(reading)
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        _verdict = lifeline.moved_out_of_the_way(writing), os.getpid()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    os.close(writing)
    gone = 0
    while not gone:
        is_interrupt_for_us = _wait_for_signal(awaited)
        gone, status = os.waitpid(fork, os.WNOHANG)
        if not gone and is_interrupt_for_us:
            os.kill(fork, signal.SIGINT)
    return _exit_code(os.waitstatus_to_exitcode(status), reading)


def _wait_for_signal(awaited: set[signal.Signals]) -> bool:
    """Wait for one of these signals. Returns whether it is an interrupt that was sent to this
    process alone: the terminal interrupts the fork too. Where a signal does not tell its sender,
    every interrupt counts as the terminal's.
    """
    if not hasattr(signal, "sigwaitinfo"):
        signal.sigwait(awaited)
        return False
    came = signal.sigwaitinfo(awaited)
    return came.si_signo == signal.SIGINT and came.si_code <= 0


def _exit_code(code: int, verdict: int) -> int:
    """The exit code of a fork that ended with `code` and may have written a verdict into this
    pipe."""
    os.set_blocking(verdict, False)
    with contextlib.suppress(BlockingIOError):  # it is still open if a component has forked
        if os.read(verdict, 100) == b"%d\n" % code:
            return code
    if -code in STOP_SIGNALS:
        return 128 - code
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
    hint = "a component may have called os._exit" if code >= 0 else "its last output may show where"
    raise WorkerError(f"the command {how}, before its work was done", hint=hint, code="F01")


def report_verdict(code: int) -> None:
    """Report, in the fork, that its work is done and it is about to exit with this code."""
    if _verdict is not None and os.getpid() == _verdict[1]:
        with contextlib.suppress(OSError):
            os.write(_verdict[0], b"%d\n" % code)
