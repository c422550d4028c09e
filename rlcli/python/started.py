"""Runs a command of rlcli in a process of its own, as a shell would, and shows its progress here.

The run has the same supervisor and folder as one that is started in a shell. It is in a process
group of its own, so that an interrupt reaches it exactly once: from here.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlcli.errors import RlcliError, Stopped, WorkerError, from_document
from rlcli.launch.supervisor import PARENT
from rlcli.observe.display import EVENTS, Display, open_display
from rlcli.observe.events import show_event
from rlcli.observe.notebook import is_notebook


def run_command(words: Sequence[str], quiet: bool) -> dict[str, Any]:
    """Run `rlcli <words>` to its end; returns what it prints with --json.

    Raises the error that it ended with, Stopped if it was asked to stop, and KeyboardInterrupt if
    that was an interrupt of this program.
    """
    events, for_events = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rlcli", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(for_events,),
        process_group=0,
        env=_environment(for_events),
    )
    os.close(for_events)
    with _open_display(quiet) as display, _ended_with_this(process), _interrupts(process) as sent:
        results = HeldBack("{", sys.stdout)
        errors = HeldBack("error[", sys.stderr, several=True)
        _read_lines(
            {
                events: lambda line: show_event(line, display),
                process.stdout.fileno(): results.take,  # type: ignore[union-attr]
                process.stderr.fileno(): errors.take,  # type: ignore[union-attr]
            }
        )
        process.wait()
    os.close(events)
    if sent:
        raise KeyboardInterrupt
    return _result(process.returncode, results, errors)


def _environment(for_events: int) -> dict[str, str]:
    """Variables of the command. A notebook asks for colours, which would be in the way here."""
    inherited = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    return inherited | {"NO_COLOR": "1", EVENTS: str(for_events), PARENT: str(os.getpid())}


def _open_display(quiet: bool) -> Display:
    if is_notebook() and not quiet:
        from rlcli.observe.notebook import NotebookDisplay

        return NotebookDisplay()
    return open_display(quiet, sys.stderr)


@contextmanager
def _ended_with_this(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Have the run stop in order if an error of this program leaves the context."""
    with process:
        try:
            yield
        finally:
            if process.poll() is None:
                process.terminate()


@contextmanager
def _interrupts(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass interrupts of this program on to the process, and yield the list of those that came.
    Only the main thread is interrupted, and only if interrupts are not ignored."""
    sent: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        sent.append(number)
        process.send_signal(signal.SIGINT)

    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if is_ignored or threading.current_thread() is not threading.main_thread():
        yield sent
        return
    before = signal.signal(signal.SIGINT, pass_on)
    try:
        yield sent
    finally:
        signal.signal(signal.SIGINT, before)


class HeldBack:
    """Shows what a process prints, except from the last line on that starts with `beginning`; if
    there may be `several`, from the first one on."""

    def __init__(self, beginning: str, stream: Any, several: bool = False):
        self.lines: list[str] = []
        """The lines that are held back."""
        self._beginning = beginning
        self._stream = stream
        self._several = several

    def take(self, line: str) -> None:
        if line.startswith(self._beginning) and not self._several:
            self.show()
        if line.startswith(self._beginning) or self.lines:
            self.lines.append(line)
        else:
            print(line, file=self._stream, flush=True)

    def show(self, all_but: int = 0) -> None:
        """Show what is held back, but not the last lines that start so, and what follows them."""
        starts = [n for n, line in enumerate(self.lines) if line.startswith(self._beginning)]
        end = starts[-all_but:][0] if all_but and starts else len(self.lines)
        for line in self.lines[:end]:
            print(line, file=self._stream, flush=True)
        self.lines.clear()


def _read_lines(readers: dict[int, Callable[[str], None]]) -> None:
    """Give each line from these descriptors to its reader, until all are closed."""
    unfinished = dict.fromkeys(readers, b"")
    with selectors.DefaultSelector() as selector:
        for descriptor in readers:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                block = os.read(key.fd, 1 << 16)
                *lines, unfinished[key.fd] = (unfinished[key.fd] + block).split(b"\n")
                for line in lines:
                    readers[key.fd](line.decode(errors="replace"))
                if not block:
                    selector.unregister(key.fd)


def _result(code: int, results: HeldBack, errors: HeldBack) -> dict[str, Any]:
    """The JSON document that the command printed, if it describes a success."""
    document: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        document = json.loads("\n".join(results.lines))
    if document.get("ok"):
        errors.show()
        return document
    if "problems" in document:
        errors.show(all_but=len(document["problems"]))
        raise from_document(document)
    errors.show()
    if "run_dir" in document:
        raise _stopped(document)
    results.show()
    raise WorkerError(f"the command ended with exit code {code}")


def _stopped(document: dict[str, Any]) -> RlcliError:
    error = Stopped(
        f"the run was stopped at step {document['steps']}",
        hint=f"rlcli.run({document['run_dir']!r}).resume() continues it",
    )
    error.exit_code = document["exit_code"]
    return error
