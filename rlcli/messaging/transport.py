"""How requests reach workers and replies come back: over ZeroMQ, or by plain calls in one process.

Over ZeroMQ every message carries the run's random token; `control` decides who may connect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import zmq

from rlcli.api.headway import Headway
from rlcli.api.timing import recorded
from rlcli.errors import HangError, RlcliError, WorkerError
from rlcli.messaging.control import CONTROL_FILE, Control, listen
from rlcli.messaging.messages import (
    COMPUTE,
    HELLO,
    LARGEST,
    LAST_REQUEST,
    Failure,
    FailureOf,
    Fields,
    Handle,
    Listener,
    ProtocolError,
    Reply,
    Report,
    Request,
    pack,
    split,
    unpack,
)
from rlcli.messaging.pulse import BEAT_SECONDS, LOST_AFTER, Peer, Pulse, Pulses
from rlcli.open_files import has_none_left, none_left
from rlcli.processes import OwnPauses, start_time

log = logging.getLogger(__name__)

SILENT = 10.0
"""Seconds without a heartbeat after which a rank is named as the one that hangs."""
LONGEST_SILENCE = 300.0
"""Seconds without a heartbeat after which a rank counts as hanging,
whatever the other deadlines are."""
FIND_CULPRIT_WITHIN = 5.0
"""Seconds to find out whether an unexpected error of one rank is a consequence of another rank's
death."""
REPORT_WITHIN = 30_000
"""Milliseconds for a report to reach a busy master."""
MISSED = 3 * BEAT_SECONDS
"""Seconds of silence after which a rank is suspected of having died."""
CHECK_SECONDS = 1.0
"""Seconds between two checks that all of the run's processes are alive."""


class Transport(Protocol):
    """The master's end of the transport."""

    on_report: Listener
    """Receives the workers' unsolicited reports: over ZeroMQ inside `receive`; inline in the
    reporting thread, even while a request is handled. It must not raise."""

    def send(self, rank: int, request: Request, limit: float = 0.0) -> None:
        """Send a request to a worker, which may take `limit` seconds; workers handle their requests
        in the order they were sent. Inline it is handled before this returns."""

    def receive(
        self, deadline: float, waiting_for: str, limit: float | None = None
    ) -> Reply | None:
        """The next reply of any worker; None if a report came first. Raises HangError when
        `deadline` (seconds from now) passes. `limit`: the total seconds allowed,
        some of which may have passed."""

    def clock(self) -> float:
        """Seconds that the master has been running: its own pauses count against no rank."""

    def close(self) -> None: ...


class ZmqMaster:
    """The master's socket. `is_alive` raises when processes of the run have ended, or have been
    silent on another node for longer than the given seconds."""

    def __init__(
        self,
        folder: Path,
        world_size: int,
        is_alive: Callable[[float], None],
        host: str | None = None,
        most: int = LARGEST,
    ):
        """Listen on the host's address, or else in a private folder; in either case the folder has
        what the workers need in order to connect. `most`: maximum bytes of a message."""
        self._context = zmq.Context()
        try:
            self._listening = listen(self._context, folder, host)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._socket, self._token = self._listening.requests, self._listening.control.token
        self.pulses = Pulses(self._listening)
        self.on_report: Listener = ignore
        self._is_alive = is_alive
        self._world_size = world_size
        self._most = most
        self._identities: dict[tuple[int, str], bytes] = {}
        """Rank and lane → the identity that answers."""
        self._expected = {(rank, COMPUTE) for rank in range(world_size)}
        """All ranks and lanes, whether up or not; a rank reports which lanes it has."""
        self._pauses = OwnPauses()
        self._listening_since = self._checked = time.monotonic()
        """Since when the master listens, and when the processes were last checked."""
        self._paused = 0.0
        """Total seconds of the master's own pauses."""
        self.pids: dict[int, int] = {}
        """Rank → its process id."""
        self.has_let_go = False
        """The workers were asked to shut down: they may end."""
        self.rejected = 0
        """Messages discarded because they were not from one of our workers."""
        self._control = folder / CONTROL_FILE

    def wait_for_workers(self, deadline: float) -> None:
        """Wait until every rank has said hello. Raises the error of a rank that cannot start, and
        ResourceError F61 if there were no descriptors left for its connections."""
        end = time.monotonic() + deadline
        work, is_up = Headway(self._world_size, "ranks"), 0
        while missing := sorted({rank for rank, _ in self._expected - {*self._identities}}):
            work.advance(self._world_size - len(missing) - is_up)
            is_up = self._world_size - len(missing)
            late = f"rank {missing[0]} to start ({len(missing)} of {self._world_size} are missing)"
            try:
                message = self._next(
                    end - time.monotonic(), late, deadline, "launch.startup_deadline"
                )
            except HangError as error:
                if has_none_left():
                    raise none_left("the master", error.what) from error
                raise
            if message.failure is not None:
                raise message.failure.as_error()

    def send(self, rank: int, request: Request, limit: float = 0.0) -> None:
        self.has_let_go = self.has_let_go or request.op == LAST_REQUEST
        message = pack(request, self._token)
        if len(message) > self._most:
            raise RlcliError(
                f"request {request.op} takes {len(message)} bytes; at most {self._most} can be sent"
            )
        try:
            self._socket.send_multipart([self._identities[rank, request.lane], *split(message)])
        except zmq.ZMQError as error:
            self._await_death()
            raise self._lost_connection(rank) from error

    def receive(
        self, deadline: float, waiting_for: str, limit: float | None = None
    ) -> Reply | None:
        message = self._next(deadline, waiting_for, limit)
        if isinstance(message, Reply):
            return message
        self.on_report(message)
        return None

    def clock(self) -> float:
        self._own_pause()
        return time.monotonic() - self._paused

    def _next(
        self,
        deadline: float,
        waiting_for: str,
        limit: float | None = None,
        key: str = "launch.step_deadline",
    ) -> Reply | Report:
        self._own_pause()
        if time.monotonic() - self._checked > CHECK_SECONDS and not self._socket.poll(timeout=0):
            self._check_processes()  # a busy run is never idle
        end = time.monotonic() + deadline
        while True:
            has_message = self._socket.poll(timeout=200)
            end += self._own_pause()
            message = self._read() if has_message else None
            if (
                isinstance(message, Reply)
                and message.failure is not None
                and message.failure.is_unexpected
            ):
                self._await_death()
            if message is not None:
                return message
            if not has_message:  # first read what a rank sent before it died
                self._check_processes()
            self._check_clocks(end, deadline if limit is None else limit, waiting_for, key)

    def _check_processes(self) -> None:
        """Raise WorkerError if processes have ended, or have lost their connection to us: requests
        or replies may be lost."""
        self._is_alive(LOST_AFTER)
        for (kind, rank), facts in list(self.pulses.facts.items()):
            if kind == "rank" and facts.get("has_lost_connection") and not self.has_let_go:
                raise self._lost_connection(rank)
        self._checked = time.monotonic()

    def _own_pause(self) -> float:
        """Seconds in which the master did not listen. They count against no rank: its heartbeats
        are waiting to be read, or it was stopped as the master was."""
        seconds = self._pauses.since_last_look()
        if seconds:
            self._listening_since = time.monotonic()
            self._paused += seconds
        return seconds

    def _read(self) -> Reply | Report | None:
        """The message that has arrived; None if it is not from our workers."""
        identity, *frames = self._socket.recv_multipart()
        try:
            message: Reply | Report = unpack(frames, self._token, Reply, Report, most=self._most)
            if message.rank >= self._world_size:
                raise ProtocolError(f"there is no rank {message.rank}")
        except ProtocolError as error:
            self.rejected += 1
            log.warning("a message on the control socket was discarded: %s", error)
            return None
        if isinstance(message, Report) and message.name == HELLO:
            self._identities[message.rank, message.value.get("lane", COMPUTE)] = identity
            self.pids[message.rank] = int(message.value.get("pid", 0))
            self._expected |= {(message.rank, lane) for lane in message.value.get("lanes", ())}
        return message

    def silences(self) -> dict[Peer, float]:
        """Seconds since each process was last heard, excluding times in which the master did not
        listen."""
        now = time.monotonic()
        return {
            peer: now - max(heard, self._listening_since)
            for peer, heard in sorted(self.pulses.heard.items())
        }

    def _lost_connection(self, rank: int) -> WorkerError:
        message = f"the connection between the master and rank {rank} was lost"
        hint = "the network between the nodes, or a firewall, has closed it"
        return WorkerError(message, where=self._name(rank), hint=hint, code="F08")

    def _name(self, rank: int) -> str:
        return f"rank {rank} pid {self.pids.get(rank)}"

    def _check_clocks(self, end: float, limit: float, waiting_for: str, key: str) -> None:
        """Raise HangError if the answer is late or a rank has been silent for too long."""
        silent = {
            n: seconds
            for (kind, n), seconds in self.silences().items()
            if kind == "rank" and seconds > SILENT
        }
        is_late = time.monotonic() > end
        if not is_late and max(silent.values(), default=0.0) <= LONGEST_SILENCE:
            return
        problems = [f"no answer within {limit:.0f} s"] if is_late else []
        problems += [
            f"rank {rank} has been silent for {seconds:.0f} s" for rank, seconds in silent.items()
        ]
        hint = "logs/rank<n>.log in the run directory says where each rank is"
        raise HangError(
            f"{', '.join(problems)}: waiting for {waiting_for}",
            where=", ".join(map(self._name, silent)) or None,
            hint=f"{hint}; {key} is the limit" if is_late else hint,
        )

    def _await_death(self) -> None:
        """When a rank dies, the others fail at their next collective;
        the user must be shown the death."""
        end = time.monotonic() + FIND_CULPRIT_WITHIN
        while time.monotonic() < end:
            self._is_alive(LOST_AFTER)
            time.sleep(0.05)
        self._is_alive(MISSED)

    def close(self) -> None:
        self.pulses.close()
        self._listening.close()
        self._context.term()
        self._control.unlink(missing_ok=True)


class ZmqWorker:
    """The socket of a worker, or of another lane of it."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        node: int = 0,
        main: ZmqWorker | None = None,
        most: int = LARGEST,
    ):
        """Connect to the master listening in this folder. `main`: whose lane it is; `most`:
        bytes of a message."""
        self._most = most
        self._control = Control.read(folder)
        self._token = self._control.token
        self._rank = rank
        self.context: Any = zmq.Context() if main is None else main.context
        self._socket = self._control.connect(self.context, self._control.requests)
        self._is_main = main is None
        if main is None:
            facts = {"node": node, "started": start_time(os.getpid())}
            self.pulse = Pulse(self.context, self._control, ("rank", rank), _end_here, **facts)
        else:
            self.pulse = main.pulse
        self.pulse.watch(self._socket)

    def fail(self, failure: Failure) -> None:
        """Report to the master that this rank cannot start."""
        self._socket.send_multipart(
            self._frames(Report(self._rank, HELLO, {"pid": os.getpid()}, failure))
        )

    def report(self, name: str, value: Fields, failure: Failure | None = None) -> None:
        """Send the master an unsolicited report, from any thread: it has a socket of its own, so it
        may overtake replies and other reports."""
        self._send_apart(Report(self._rank, name, value, failure))

    def serve(
        self,
        handle: Handle,
        failure: FailureOf,
        until: str = LAST_REQUEST,
        at_once: int = 1,
        **hello: Any,
    ) -> None:
        """Say hello, with what else the master must know; then answer requests up to and including
        `until`: one by one, or side by side in up to `at_once` threads. `lanes`:
        names of the worker's other lanes, which say hello themselves, with their `lane`.

        Waiting here has no deadline: a worker ends with its parent, and on several nodes when it
        has lost the master.
        """
        self._socket.send_multipart(
            self._frames(Report(self._rank, HELLO, {"pid": os.getpid(), **hello}))
        )

        def answer(request: Request) -> Reply:
            return _answer(request, self._rank, handle, failure)

        def answer_apart(request: Request) -> None:
            self._send_apart(answer(request))

        with ThreadPoolExecutor(at_once, hello.get("lane", COMPUTE)) as threads:
            while (request := self._next_request()).op != until:
                if at_once > 1:
                    threads.submit(answer_apart, request)
                else:
                    self._socket.send_multipart(self._frames(answer(request)))
        self._socket.send_multipart(self._frames(answer(request)))

    def _next_request(self) -> Request:
        while True:
            frames = self._socket.recv_multipart()
            try:
                request: Request = unpack(frames, self._token, Request, most=self._most)
            except ProtocolError as error:
                log.warning("a message on the control socket was discarded: %s", error)
                continue
            return request

    def _send_apart(self, message: Reply | Report) -> None:
        """Send a message from any thread, with a socket of its own."""
        socket = self._control.connect(self.context, self._control.requests)
        socket.send_multipart(self._frames(message))
        socket.close(linger=REPORT_WITHIN)

    def close(self) -> None:
        if self._is_main:
            self.pulse.close()
        self._socket.close()
        if self._is_main:
            self.context.term()

    def _frames(self, message: Reply | Report) -> list[bytes]:
        packed = pack(message, self._token)
        if len(packed) > self._most:
            error = RlcliError(
                f"the answer of {len(packed)} bytes is too long; at most {self._most} can be sent"
            )
            packed = pack(replace(message, value={}, failure=Failure.of(error, "")), self._token)
        return split(packed)


def _answer(request: Request, rank: int, handle: Handle, failure: FailureOf) -> Reply:
    try:
        return _answer_timed(request, rank, handle)
    except Exception as error:
        return Reply(request.number, rank, failure=failure(error))


def _answer_timed(request: Request, rank: int, handle: Handle) -> Reply:
    """The answer, with the time that it took. Raises what `handle` raises."""
    with recorded() as timing:
        value = handle(request)
    return Reply(request.number, rank, value, timing=timing.as_json())


def _end_here(why: str) -> None:
    """End this process at once, whatever its other threads are doing."""
    log.error("%s: this rank ends", why)
    os.kill(os.getpid(), signal.SIGKILL)


def ignore(report: Report) -> None:
    """Discard a report: nobody listens."""


class InlineTransport:
    """A request is a plain call in this process, made where it is sent: a debugger and a traceback
    show who asked. Lanes other than COMPUTE have a thread each.

    `waiting` is entered around each call with its name and deadline: only another process can end
    the call. `check` runs before each call: it raises when processes that belong to the run have
    ended.
    """

    def __init__(
        self,
        handle: Handle,
        waiting: Callable[[str, float], AbstractContextManager[None]] = lambda request, deadline: (
            nullcontext()
        ),
        check: Callable[[], None] = lambda: None,
    ):
        self._handle = handle
        self._waiting = waiting
        self._check = check
        self._lanes: dict[str, queue.SimpleQueue[Request]] = {}
        self._replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        """Replies; None for a report."""
        self.on_report: Listener = ignore

    def report(self, name: str, value: Fields, failure: Failure | None = None) -> None:
        """The worker's end; any of its threads may call it."""
        self.on_report(Report(0, name, value, failure))
        self._replies.put(None)

    def send(self, rank: int, request: Request, limit: float = 0.0) -> None:
        if request.lane == COMPUTE:
            self._check()
            with self._waiting(f"{request.name} on rank {rank}", limit):
                self._replies.put(_answer_timed(request, rank, self._handle))
            return
        if request.lane not in self._lanes:
            self._lanes[request.lane] = queue.SimpleQueue()
            threading.Thread(
                target=self._serve_lane, args=(request.lane,), name=request.lane, daemon=True
            ).start()
        self._lanes[request.lane].put(request)

    def _serve_lane(self, lane: str) -> None:
        failure = partial(Failure.of, where=lane)
        while True:
            self._replies.put(_answer(self._lanes[lane].get(), 0, self._handle, failure))

    def receive(
        self, deadline: float, waiting_for: str, limit: float | None = None
    ) -> Reply | None:
        end = time.monotonic() + deadline
        while True:
            self._check()
            remaining = max(0.0, end - time.monotonic())
            with contextlib.suppress(queue.Empty):
                return self._replies.get(timeout=min(remaining, CHECK_SECONDS))
            if not remaining:
                raise HangError(f"no answer within {deadline:.0f} s: waiting for {waiting_for}")

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Do nothing: the process is its own."""
