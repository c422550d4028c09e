"""Environments in a process next to their rank, which they can neither stop nor harm."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlcli.api.environment import named_variables
from rlcli.api.tool_schema import Schema
from rlcli.errors import ProjectError, WorkerError
from rlcli.processes import start_isolated
from rlcli.project import VARIABLE
from rlcli.registry import load

from ._environment_calls import BEGINNINGS, Reply, Request
from ._prints import show_prints
from .rewards._worker_pool import START_LIMIT_S, STARTS, end_processes

SCRIPT = str(Path(__file__).with_name("_environment_host.py"))
CLOSING_S = 8.0
"""Seconds in which the process closes its environments and ends."""
SPARE_S = 30.0
"""Seconds after the limit of a call in which the process must have answered it."""
VARIABLES = ("HOME", "USER", "TMPDIR", VARIABLE)
"""Variables that environments see, apart from those of every isolated process."""

LOOK_S = 0.5
"""Seconds between two looks at a process that should have answered."""
CLOSE_S = 4.0
"""Seconds in which an environment must be closed."""

T = TypeVar("T")
Answers = queue.SimpleQueue[tuple[int, Reply]]


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """Which environments a process is for, and what bounds them."""

    environment: str
    args: Mapping[str, Any]
    longest: int
    """Characters of an observation."""
    call_seconds: float
    """Seconds of a call; each tool counts as one."""
    memory_bytes: int
    """Of each environment's process."""


class EnvironmentPool:
    """Starts the process with the first call, and another one if it ends. For several threads."""

    def __init__(self, settings: EnvironmentSettings, most: int, variables: tuple[str, ...] = ()):
        """`most`: environments at once."""
        self.settings = settings
        self._free = most
        self._freed = threading.Condition()
        self._variables = variables
        self._hosts: list[EnvironmentHost] = []
        """The one that runs, if any."""
        self._starting = threading.Lock()
        self._schemas: list[Schema] | None = None
        self._numbers = itertools.count()
        self._stop = weakref.finalize(self, _stop, self._hosts)

    @contextmanager
    def room(self, episodes: int) -> Iterator[int]:
        """Room for the environments of so many episodes, or for as many as other calls leave. Waits
        until there is room for at least one."""
        with self._freed:
            self._freed.wait_for(lambda: self._free)
            count = min(episodes, self._free)
            self._free -= count
        try:
            yield count
        finally:
            with self._freed:
                self._free += count
                self._freed.notify_all()

    @contextmanager
    def calls(self) -> Iterator[EnvironmentCalls[Any]]:
        """The calls of some episodes. Closes their environments in the end."""
        calls = EnvironmentCalls[Any](self)
        try:
            yield calls
        finally:
            calls.close()

    def tool_schemas(self) -> list[Schema]:
        """The schemas of the tools that the environment states, of which it is asked once. Raises
        WorkerError if it does not answer, ProjectError if the answer is wrong."""
        if self._schemas is None:
            with self.calls() as calls:
                calls.ask("its tools", {"call": "tool_schemas"})
                ((_, reply),) = calls.take(wait=True)
            self._schemas = self._stated(reply)
        return self._schemas

    def _stated(self, reply: Reply) -> list[Schema]:
        subject = f"the environment {self.settings.environment}"
        match reply:
            case {"value": list(schemas)}:
                return schemas
            case {"fault": fault, "where": where}:
                raise ProjectError(f"{subject}: {fault}", where=where, code="F54")
        reason = reply.get("failure") or reply.get("limit")
        raise WorkerError(f"{subject} does not say which tools it has: {reason}", code="F52")

    def close(self) -> None:
        _stop(self._hosts)

    def next_number(self) -> int:
        return next(self._numbers)

    def host(self) -> EnvironmentHost:
        """The process. Raises ProjectError if it cannot load the environment, WorkerError if it
        does not start."""
        with self._starting:
            if self._hosts and self._hosts[0].has_ended:
                self._hosts.pop().stop()
            if not self._hosts:
                self._hosts.append(self._started())
            return self._hosts[0]

    def _started(self) -> EnvironmentHost:
        variables = self._visible()
        for _ in range(STARTS - 1):
            with contextlib.suppress(WorkerError):
                return EnvironmentHost(self.settings, variables)
        return EnvironmentHost(self.settings, variables)

    def _visible(self) -> dict[str, str]:
        """The variables that environments see."""
        environment: Any = load("environments", self.settings.environment)
        secrets = named_variables(environment, self.settings.args)
        names = (*VARIABLES, *self._variables, *secrets)
        return {name: os.environ[name] for name in names if name in os.environ}


def _stop(hosts: list[EnvironmentHost]) -> None:
    while hosts:
        hosts.pop().stop()


class EnvironmentHost:
    """The process that runs `_environment_host.py`; a thread hears what it answers."""

    def __init__(self, settings: EnvironmentSettings, variables: Mapping[str, str]):
        command = [sys.executable, "-P", SCRIPT]
        self._process = start_isolated(command, OMP_NUM_THREADS="1", **variables)
        self._waiting: dict[int, Answers] = {}
        """Environment → who waits for its answer."""
        self._lock = threading.Lock()
        self.has_ended = False
        self._started: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._hear, name="environments", daemon=True).start()
        self._write(_line({**vars(settings), "parent": os.getpid(), "folder": os.getcwd()}))
        self._check_started()

    def ask(self, number: int, request: Request, seconds: float, answers: Answers) -> None:
        """Have an environment answer a request within so many seconds."""
        line = _line({"number": number, "request": request, "seconds": seconds})
        with self._lock:
            has_ended = self.has_ended
            if not has_ended:
                self._waiting[number] = answers
        if has_ended:
            answers.put((number, self._gone()))
            return
        self._write(line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def stop(self) -> None:
        """Have all environments closed, and end the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSING_S)
        end_processes([self._process])

    def _check_started(self) -> None:
        try:
            report = self._started.get(timeout=START_LIMIT_S)
        except queue.Empty:
            report = None
        if report is None:
            self.kill()
            self.stop()
            message = f"the process for environments did not start: {self._gone()['failure']}"
            raise WorkerError(message, code="F52")
        if "broken" in report:
            self.stop()
            where, hint = report["where"], report["hint"]
            raise ProjectError(report["broken"], where=where, hint=hint)

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._lock:  # `_hear` notices that it has ended
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _hear(self) -> None:
        """Pass answers on, until the process ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            show_prints(message.get("reply", message).pop("printed", None))
            if "number" in message:
                number, reply = message["number"], message["reply"]
                if (waiting := self._waiting.pop(number, None)) is not None:
                    waiting.put((number, reply))
            else:
                self._started.put(message)
        self._process.wait()
        with self._lock:
            self.has_ended = True
            unanswered = dict(self._waiting)
            self._waiting.clear()
        self._started.put(None)
        for number, answers in unanswered.items():
            answers.put((number, self._gone()))

    def _gone(self) -> Reply:
        return {"failure": f"the process of all environments ended ({self._process.returncode})"}


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


@dataclass(frozen=True)
class _Running(Generic[T]):
    """A call that has not been answered."""

    episode: T
    host: EnvironmentHost
    deadline: float


class EnvironmentCalls(Generic[T]):
    """What some episodes ask of their environments, one call at a time each."""

    def __init__(self, pool: EnvironmentPool):
        self._pool = pool
        self._answers: Answers = queue.SimpleQueue()
        self._homes: dict[T, tuple[int, EnvironmentHost]] = {}
        """Episode → the number of its environment, and its process."""
        self._running: dict[int, _Running[T]] = {}

    @property
    def are_running(self) -> bool:
        return bool(self._running)

    def have_answered(self) -> bool:
        """Whether `take` returns something without waiting."""
        return not self._answers.empty()

    def ask(self, episode: T, request: Request) -> None:
        """Have an episode's environment answer a request. BEGINNINGS give it a new one, `close`
        takes it away."""
        call, limit = request["call"], self._pool.settings.call_seconds
        if call in BEGINNINGS:
            self._homes[episode] = self._pool.next_number(), self._pool.host()
        number, host = self._homes[episode]
        seconds = limit * len(request.get("calls", "1"))
        if call == "close":
            del self._homes[episode]
            seconds = min(limit, CLOSE_S)
        deadline = time.monotonic() + seconds + SPARE_S
        host.ask(number, request, seconds, self._answers)
        self._running[number] = _Running(episode, host, deadline)

    def take(self, wait: bool = False, wait_for_all: bool = False) -> list[tuple[T, Reply]]:
        """Episodes, in the order in which their environments began, with what these answered."""
        answers: dict[int, tuple[T, Reply]] = {}
        while self._running and (self.have_answered() or wait_for_all or (wait and not answers)):
            number, reply = self._next()
            if number in self._running:
                answers[number] = self._running.pop(number).episode, reply
        return [answer for _, answer in sorted(answers.items())]

    def close(self) -> None:
        """Close the environments of all episodes."""
        for episode in list(self._homes):
            self.ask(episode, {"call": "close"})
        self.take(wait_for_all=True)

    def _next(self) -> tuple[int, Reply]:
        while True:
            patience = min(running.deadline for running in self._running.values())
            try:
                return self._answers.get(timeout=max(patience - time.monotonic(), LOOK_S))
            except queue.Empty:  # the process itself does nothing any more: end it
                for running in self._running.values():
                    if running.deadline <= time.monotonic():
                        running.host.kill()
