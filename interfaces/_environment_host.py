"""The process in which the environments of a rank live, each in a fork of it. Started by
`_environment_pool`, as a script.

It passes requests to the environments and replies back, and ends those that exceed a limit. It runs
no code of theirs but the import, and never waits for one of them. All that an environment has
started ends with it, and all of them end with the rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, TextIO

import psutil

from rlcli.api.config import EnvironmentAbstraction
from rlcli.api.environment import Environment
from rlcli.errors import RlcliError
from rlcli.interfaces._environment_calls import (
    BEGINNINGS,
    LONGEST_REPLY,
    AnsweringEnvironment,
    Reply,
    as_line,
    secrets_of,
    without_secrets,
)
from rlcli.interfaces._prints import Prints
from rlcli.interfaces.rewards._process_tree import (
    adopt_orphans,
    descendants_of,
    end_descendants_of,
)
from rlcli.interfaces.rewards._syscall_filter import refuse_signals
from rlcli.interfaces.rewards._worker import private_pipes
from rlcli.processes import STOP_SIGNALS, die_with_parent, ended_how, limit_memory
from rlcli.registry import environment_maker, load

GRACE = 1.0
"""Seconds for a call to end that is interrupted at its limit; it is then ended with its process."""
CLOSING = 5.0
"""Seconds in which an environment must be closed that is abandoned."""
LOOK = 1.0
"""Seconds between two checks whether the rank is still there."""
PIECE = 1 << 16
EVERYTHING = -1
"""The target of a signal to all processes of the user."""
NO_REPLY = "its process wrote something other than its reply"


@dataclass(eq=False)
class EnvironmentProcess:
    """The process of an environment, as the host sees it."""

    pid: int
    link: socket.socket
    number: int = -1
    """The environment that lives there."""
    asked: list[str] = field(default_factory=list)
    """Calls that it has not answered, in order."""
    deadline: float = math.inf
    """When it must have answered."""
    unsent: bytes = b""
    received: bytearray = field(default_factory=bytearray)


class Host:
    """Requests are lines `{"number": …, "request": …, "seconds": …}` of JSON, answered by
    `{"number": …, "reply": …}` in any order. BEGINNINGS begin an environment, `close` ends it.

    Every environment has a process for itself. Once it is closed, the process ends too, or is used
    for another one, if environments are REPRODUCIBLE and so do not depend on what was before.
    """

    def __init__(
        self, settings: dict[str, Any], requests: BinaryIO, replies: TextIO, prints: Prints
    ):
        self._settings = settings
        self._prints = prints
        self._requests = requests
        self._replies = replies
        os.chdir(settings["folder"])
        chosen = EnvironmentAbstraction(settings["environment"], settings["args"])
        self._make = environment_maker(chosen)
        environment: Any = load("environments", settings["environment"])
        self._uses_again = environment.REPRODUCIBLE
        self._secrets = secrets_of(environment, settings["args"])
        for module in environment.PRELOAD:
            importlib.import_module(module)
        self._homes: dict[int, EnvironmentProcess] = {}
        """Environment → its process."""
        self._free: list[EnvironmentProcess] = []
        """Processes without an environment."""
        self._ended: dict[int, str] = {}
        """How environments ended that nobody was waiting for."""
        self._spared = _run_of(os.getpid())
        self._partial = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)

    def without_secrets(self, text: str) -> str:
        return str(without_secrets(text, self._secrets))

    def run(self) -> None:
        """Serve until the rank is gone or has closed the pipe; then close all environments."""
        while self._serve_once():
            pass
        self._selector.unregister(self._requests)
        for number in list(self._homes):
            self._ask(number, {"call": "close"}, CLOSING - GRACE)
        while self._homes:
            self._serve_once()
        for process in list(self._free):
            self._end(process, "")

    def _serve_once(self) -> bool:
        """Do what is to be done now, or wait for it. False if the rank asks for nothing more."""
        deadlines = [process.deadline for process in self._homes.values()]
        patience = min([LOOK, *(deadline - time.monotonic() for deadline in deadlines)])
        has_rank = os.getppid() == self._settings["parent"]
        for key, events in self._selector.select(max(0.0, patience)):
            if key.data is not None:
                self._attend(key.data, events)
            else:
                has_rank = self._read_requests() and has_rank
        self._end_late()
        self._end_dead()
        return has_rank

    # -- the rank ----------------------------------------------------------------------------------

    def _read_requests(self) -> bool:
        """Read what the rank asks for; False if it asks for nothing any more."""
        piece = os.read(self._requests.fileno(), PIECE)
        *lines, self._partial = (self._partial + piece).split(b"\n")
        for line in lines:
            self._ask(**json.loads(line))
        return bool(piece)

    def _ask(self, number: int, request: dict[str, Any], seconds: float) -> None:
        call = request["call"]
        if call in BEGINNINGS:
            try:
                self._homes[number] = self._free.pop() if self._free else self._started()
            except OSError as error:
                self._ended[number] = f"no process could be started: {error}"
        process = self._homes.get(number)
        if process is None:
            how = self._ended.pop(number, None)
            self._reply(number, {"failure": how} if call != "close" else {"value": None})
            return
        process.number = number
        process.asked.append(call)
        allowed = time.monotonic() + seconds + GRACE
        process.deadline = min(process.deadline, allowed) if process.asked[1:] else allowed
        process.unsent += json.dumps(request).encode() + b"\n"
        self._send(process)

    def _reply(self, number: int, reply: Reply) -> None:
        with contextlib.suppress(BrokenPipeError):  # the rank is gone, which `run` notices
            self._replies.write(json.dumps({"number": number, "reply": reply}) + "\n")
            self._replies.flush()

    # -- environments ------------------------------------------------------------------------------

    def _started(self) -> EnvironmentProcess:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._forget(ours)
                refuse_signals(self._spared)
                live(theirs, self._make, self._settings, self._secrets, self._prints)
            finally:
                os._exit(1)
        theirs.close()
        ours.setblocking(False)
        process = EnvironmentProcess(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, process)
        return process

    def _forget(self, ours: socket.socket) -> None:
        """In a fork: close what is the host's."""
        self._selector.close()
        for process in self._processes():
            process.link.close()
        ours.close()
        self._requests.close()
        os.close(self._replies.fileno())

    def _processes(self) -> list[EnvironmentProcess]:
        return [*self._homes.values(), *self._free]

    def _attend(self, process: EnvironmentProcess, events: int) -> None:
        if process.link.fileno() < 0:  # ended since the selector returned
            return
        if events & selectors.EVENT_WRITE:
            self._send(process)
        if events & selectors.EVENT_READ:
            self._receive(process)

    def _send(self, process: EnvironmentProcess) -> None:
        """Send as much as it takes at once."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            process.unsent = process.unsent[process.link.send(process.unsent) :]
        writing = selectors.EVENT_WRITE if process.unsent else 0
        self._selector.modify(process.link, selectors.EVENT_READ | writing, process)

    def _receive(self, process: EnvironmentProcess) -> None:
        try:
            piece = process.link.recv(PIECE)
        except ConnectionResetError:
            piece = b""
        process.received += piece
        if not piece:
            self._end(process, "failure")
        elif len(process.received) > LONGEST_REPLY:
            self._end(process, "failure", NO_REPLY)
        elif piece.endswith(b"\n"):
            self._hear(process)

    def _hear(self, process: EnvironmentProcess) -> None:
        """A reply, or something else that was written in its place."""
        line = bytes(process.received)
        process.received.clear()
        try:
            reply = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            self._end(process, "failure", NO_REPLY)
            return
        if not process.asked:
            return
        call = process.asked.pop(0)
        if process.asked:  # it is being closed: nobody waits for this
            return
        process.deadline = math.inf
        self._reply(process.number, reply)
        if call == "close":
            self._free.append(self._homes.pop(process.number))
            if not self._uses_again or "value" not in reply or descendants_of(process.pid):
                self._end(process, "")

    def _end_late(self) -> None:
        now = time.monotonic()
        for process in [late for late in self._homes.values() if late.deadline <= now]:
            self._end(process, "limit", f"{process.asked[0]}() took too long and had to be ended")

    def _end_dead(self) -> None:
        """End what has died while something that it has started holds its end of the link."""
        with contextlib.suppress(ChildProcessError):
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None:
                return
            for process in self._processes():
                if process.pid == dead.si_pid:
                    self._end(process, "failure")
                    return
            os.waitpid(dead.si_pid, os.WNOHANG)  # one that was left behind

    def _end(self, process: EnvironmentProcess, kind: str, why: str = "") -> None:
        """End a process and what it has started. If an environment lives there, what it was asked
        gets a reply of this kind: `why`, or how the process ended by itself."""
        self._selector.unregister(process.link)
        process.link.close()
        code = _end_process(process.pid, {each.pid for each in self._processes()} - {process.pid})
        if process in self._free:
            self._free.remove(process)
            return
        del self._homes[process.number]
        reason = why or f"its process {ended_how(code)}"
        if process.asked:
            self._reply(process.number, {kind: reason})
        else:
            self._ended[process.number] = reason


def _run_of(pid: int) -> list[int]:
    """Everything above a process and itself, with their groups, and the group of everything."""
    above = [pid, *(process.pid for process in psutil.Process(pid).parents())]
    groups = {-os.getpgid(each) for each in above}
    return [*above, *(groups - {0}), EVERYTHING]


def live(
    link: socket.socket,
    make: Callable[[], Environment],
    settings: dict[str, Any],
    secrets: Sequence[str],
    prints: Prints,
) -> None:
    """The life of an environment, in a process of its own, until it is ended."""
    os.setsid()
    die_with_parent()
    adopt_orphans()
    limit_memory(settings["memory_bytes"])
    for number in STOP_SIGNALS:  # not ignored: what it starts would inherit that
        signal.signal(number, _do_nothing)
    pid, clean = os.getpid(), partial(without_secrets, secrets=secrets)
    for line in link.makefile("rb"):
        request = json.loads(line)
        if request["call"] in BEGINNINGS:
            os.chdir(settings["folder"])
            environment = AnsweringEnvironment(make, settings["longest"], settings["call_seconds"])
        reply = prints.added_to(without_secrets(environment.answer(request), secrets), clean)
        if os.getpid() != pid:  # a fork that an environment has left behind
            os._exit(0)
        link.sendall(as_line(reply))


def _do_nothing(_number: int, _frame: Any) -> None:
    """Of a signal that asks the run to stop: it needs its replies to finish the step."""


def _end_process(pid: int, others: set[int]) -> int:
    """End a process and its descendants; returns its exit code. `others`: those of other
    environments."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # it starts nothing more
    end_descendants_of(pid)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    end_descendants_of(os.getpid(), others)  # those that it has left behind
    return code


def main() -> None:
    requests, replies = private_pipes()
    settings = json.loads(requests.readline() or sys.exit(0))
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    prints = Prints()
    try:
        host = Host(settings, requests, replies, prints)
        answer = prints.added_to({"ready": True}, host.without_secrets)
    except RlcliError as error:
        answer = {"broken": error.what, "where": error.where, "hint": error.hint}
    print(json.dumps(answer), file=replies, flush=True)
    if "ready" in answer:
        gc.collect()
        gc.freeze()  # forks leave alone what they share
        host.run()
    os._exit(0)


if __name__ == "__main__":
    main()
