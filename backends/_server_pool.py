"""Several servers that hold the same weights, and what is sent to them.

An update holds requests back (`_server_admission`), waits until none is in flight (or has them
paused), and succeeds only if all servers hold the new weights; otherwise no request is admitted any
more. A server that dies is restarted with the current weights, and its requests are repeated.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcli.api.headway import doing
from rlcli.api.http_request import ServerGone, ServerLate
from rlcli.errors import HangError, ModelError, RlcliError, WorkerError

from ._server_admission import LOOK_AGAIN_S, RequestAdmission
from ._server_answers import Answer, Sampling, largest_answer, read_answer
from ._server_balance import Flight
from ._server_dialect import Call, ResponseRequest, WeightUpdate, new_id
from ._server_http import NOT_DONE, Deadlines, ServerBusy, ServerRefused
from ._server_metrics import PATH, Meter, read_metrics
from ._server_process import TRIES, Server
from ._server_times import RequestTimes

READ_AGAIN_S = 5.0
"""Seconds between readings of the servers' metrics."""
BUSY_S = 1.0
"""Seconds until a server that takes no more requests is asked again."""
ABORT_S = 5.0
"""Seconds in which a server must say that it has ended all responses."""


@dataclass(frozen=True)
class Served:
    """What a server has answered."""

    server: Server
    answer: Answer
    was_taken: bool
    """Whether the rest must come from another server, because this one is slow."""


class Servers:
    """All servers; `generate` may be called by many threads."""

    def __init__(self, servers: Sequence[Server], way: str, deadlines: Deadlines):
        """`way` of updating: disk or process_group."""
        self.servers = servers
        self.dialect = servers[0].dialect
        self._way = way
        self._deadlines = deadlines
        self._run = uuid.uuid4().hex[:8]
        """Distinguishes our weights from those that others give to a server."""
        self._admission = RequestAdmission(len(servers), self._ready, deadlines.request)
        self._meter = Meter()
        self.times = RequestTimes()
        self._aside = ThreadPoolExecutor(2, "aside")
        """Threads for requests that no response waits for."""
        self._next_look, self._next_reading = 0.0, 0.0
        self._reading: Future[None] = Future()
        """The last reading of their metrics."""
        self._reading.set_result(None)
        self._mute: set[int] = set()
        """Servers that report no metrics."""
        self._present: WeightUpdate | None = None
        self._paused: str | None = None
        """How requests in flight are paused."""
        self.pauses = 0
        """How many times requests in flight were paused."""

    @property
    def updates(self) -> int:
        """How many times all servers have taken new weights."""
        return self._admission.updates

    def _ready(self) -> list[int]:
        return [server.number for server in self.servers if server.is_ready]

    # -- weights -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all servers. Raises WorkerError, ResourceError."""
        with doing("starting servers", len(self.servers), "servers") as work:

            def start(server: Server) -> None:
                server.start()
                work.advance()

            self.each(start)

    def label(self, number: int) -> str:
        """The servers' name for our weights."""
        return f"{self._run}-{number}"

    def number(self, label: str) -> int | None:
        """The number of the weights that a server names; None if they are not ours."""
        run, _, number = label.partition("-")
        return int(number) if run == self._run and re.fullmatch("[0-9]{1,18}", number) else None

    def update(self, folder: Path, number: int) -> None:
        """Load weights into all servers and make them ready.
        Waits until no request is in flight, unless paused.

        Raises WorkerError if one of them fails; none gets any more requests then.
        """
        with self._admission.hold(drained=self._paused is None):
            update = WeightUpdate(folder, self.label(number), flushes=self._paused != "in_place")
            try:
                self._regain("weights")
                self.each(lambda server: self._bring(server, update))
                self._check_digests()
                self._regain("kv_cache")
            except RlcliError as error:
                self._admission.fail(error)
                raise
            self._present = update
            self._admission.memory_released = False
            for server in self.servers:
                server.has_released = False
            self._admission.weights_changed()

    def _bring(self, server: Server, update: WeightUpdate) -> None:
        """Load weights into a running server; if it fails,
        it is restarted and must take them then."""
        with server.lock:
            life = server.lives
            try:
                server.take(update, self._way, self._deadlines.update)
            except NOT_DONE as problem:
                self._revive(server, life, problem, update)
            else:
                server.lives += server.lives == 0
                server.is_ready = True

    def _revive(self, server: Server, life: int, problem: Exception, update: WeightUpdate) -> None:
        """Restart a server that failed in one of its lives, with weights,
        unless that has been done already.

        Raises WorkerError if it does not come back with them.
        """
        with server.lock:
            if server.lives != life and server.is_ready:
                return
            server.is_ready = server.has_released = False
            try:
                server.start()
                server.take(update, self._way, self._deadlines.update)
            except NOT_DONE as again:
                message = (
                    f"{server.name} failed ({problem}), and did not take the "
                    f"weights after that: {again}"
                )
                raise WorkerError(message, code="F92") from problem
            server.lives += 1
            server.is_ready = True
        self._admission.started(server.number)

    def _check_digests(self) -> None:
        """Check that all servers report the same weights, if they report them."""
        digests = {
            repr(server.digest): server
            for server in self.servers
            if server.ranks == self.servers[0].ranks
        }
        if len(digests) > 1:
            names = " and ".join(server.name for server in digests.values())
            raise WorkerError(f"{names} hold different weights after one update", code="F92")

    def each(self, act: Callable[[Server], Any]) -> None:
        """Call `act` with all servers in parallel. Raises the error of the first one that fails."""
        with ThreadPoolExecutor(len(self.servers)) as threads:
            for done in [threads.submit(act, server) for server in self.servers]:
                done.result()

    # -- requests ----------------------------------------------------------------------------------

    def generate(
        self, request: ResponseRequest, sampling: Sampling, stop: threading.Event, asked: float
    ) -> Served | None:
        """A server's answer to a request, which has waited since it was `asked` for; None once
        `stop` is set.

        Raises HangError, ModelError, WorkerError. A request whose server has died is repeated.
        """
        breaks, end = 0, time.monotonic() + self._deadlines.request
        while (flight := self._admission.admit(request, stop)) is not None:
            server, answer = self.servers[flight.server], None
            life = server.lives
            try:
                answer = self._ask(server, request, sampling)
            except (ServerGone, ServerLate) as problem:
                self._check_hang(server, problem, stop)
                failed = problem
            finally:
                self._take(self._ended(flight, request, answer))
                self.times.note(f"server {server.number}", asked, flight.began)
                asked = time.monotonic()
            if answer is not None:
                return Served(server, answer, flight.is_taken)
            if not stop.is_set():
                is_alive = self._lost(server, life, failed, breaks, stop)
                breaks += is_alive and not self._rests(failed, end, stop)
            request = replace(request, id=new_id())  # it may still be working on this one
        return None

    def _ask(self, server: Server, request: ResponseRequest, sampling: Sampling) -> Answer:
        body = self.dialect.body(request)
        most = largest_answer(request.max_new_tokens, request.bytes_of_experts)
        try:
            raw = server.endpoint.post(self.dialect.GENERATE, body, self._deadlines.request, most)
        except ServerRefused as problem:
            raise ModelError(f"{server.name} refuses a request: {problem}", code="F90") from None
        return read_answer(self.dialect, raw, request, sampling, server.endpoint.hostile)

    def _check_hang(self, server: Server, problem: Exception, stop: threading.Event) -> None:
        """Raise HangError if a server is alive, but has not answered in time."""
        if isinstance(problem, ServerLate) and not stop.is_set() and server.is_alive:
            raise HangError(f"{server.name} is alive, but gave {problem}", code="F91") from None

    def _rests(self, problem: Exception, end: float, stop: threading.Event) -> bool:
        """Wait a moment for a server that takes no more requests; whether that is why a request has
        failed. From `end` on, that is no excuse any more."""
        is_busy = isinstance(problem, ServerBusy) and time.monotonic() < end
        return is_busy and not stop.wait(BUSY_S)

    def _ended(
        self, flight: Flight, request: ResponseRequest, answer: Answer | None
    ) -> list[Flight]:
        if answer is None:
            return self._admission.end(flight, request.prompt, None)
        self._meter.count_response()
        text = [*request.prompt, *answer.tokens]
        return self._admission.end(flight, text, len(answer.tokens))

    # -- besides -----------------------------------------------------------------------------------

    def look(self, slow_only: bool) -> None:
        """Take a response from each server that has been silent for too long; `slow_only`: only
        from servers known to be slow. Call this often while waiting for responses."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_AGAIN_S
            self._take(self._admission.overdue(slow_only))
        if now >= self._next_reading and self._reading.done():  # servers may not answer
            self._next_reading = now + READ_AGAIN_S
            self._reading = self._aside.submit(self._read_metrics)

    def _read_metrics(self) -> None:
        for server in self.servers:
            if not server.is_ready or server.number in self._mute:
                continue
            try:
                text = server.endpoint.get_text(PATH, READ_AGAIN_S)
            except (ServerRefused, RlcliError):
                self._mute.add(server.number)
            except (ServerGone, ServerLate):
                continue
            else:
                self._meter.read(server.number, read_metrics(text, self.dialect.METRICS))

    def measured(self) -> dict[str, tuple[float, int]]:
        """(sum, count) of what servers have reported about their load since the last time."""
        return self._meter.take()

    def _take(self, flights: Sequence[Flight]) -> None:
        """Have servers end responses; their requests then get the part that exists."""
        for flight in flights:
            server = self.servers[flight.server]
            self._aside.submit(self._end, server, flight.id, server.patience)

    def _end(self, server: Server, id_: str | None, seconds: float) -> None:
        """End one response, or all."""
        path, body = self.dialect.abort(id_)
        with suppress(*NOT_DONE, RlcliError):
            server.endpoint.post(path, body, min(seconds, server.patience))

    def _lost(
        self, server: Server, life: int, problem: Exception, breaks: int, stop: threading.Event
    ) -> bool:
        """Handle a server that did not answer a request: restart it, unless only the connection
        broke, which is what this returns. `breaks`: how often that has happened to the request;
        others that broke at the same time say nothing about the server."""
        with server.lock:
            self._admission.check()  # another request may have failed while this one waited
            if server.lives != life:
                return False
            lives = not server.has_died and server.is_up and server.has_weights
            if stop.is_set():
                return False
            if lives and breaks + 1 == 2 * TRIES:
                raise server.failure(
                    f"is alive, but has not answered one request {2 * TRIES} times: {problem}"
                )
            if lives and breaks + 1 != TRIES:
                return True
            assert server.weights is not None
            try:
                self._revive(server, life, problem, server.weights)
            except RlcliError as error:
                self._admission.fail(error)
                raise
            return lives

    # -- pauses and memory -------------------------------------------------------------------------

    @contextmanager
    def paused(self, mode: str) -> Iterator[None]:
        """Pause requests in flight, and admit none. `mode`: retract (keys and values are recomputed
        afterwards) or in_place (they are kept, even if the weights change)."""
        with self._admission.hold(drained=False), self.times.paused():
            self.pauses += 1
            self._tell(self.dialect.pause(mode))
            self._paused = mode
            try:
                yield
            finally:
                self._paused = None
                self._tell(self.dialect.resume())

    def _tell(self, *calls: Call) -> None:
        """Send the same requests to all servers. One that has died is started again, and asked
        again. Raises WorkerError."""

        def ask(server: Server) -> None:
            with server.lock:  # it may just be starting again
                problem = self._refusal(server, *calls)
                if problem is not None and server.weights is not None:
                    self._revive(server, server.lives, problem, server.weights)
                    problem = self._refusal(server, *calls)
            if problem is not None:
                raise self._failed(server, calls[-1], problem) from problem

        self.each(ask)

    def _refusal(self, server: Server, *calls: Call) -> Exception | None:
        """Send requests to a server. Returns why it has not done one; None if it has."""
        try:
            for path, body in calls:
                server.endpoint.post(path, body, self._deadlines.update)
        except NOT_DONE as problem:
            return problem
        return None

    def _failed(self, server: Server, call: Call, problem: Exception) -> WorkerError:
        return WorkerError(f"{server.name} failed at {call[0]}: {problem}", code="F91")

    def release(self) -> None:
        """Release the device's memory until the next update. Its content is lost."""
        if self._admission.memory_released:
            return
        with self._admission.hold():
            self._admission.memory_released = True
            self._tell(*self.dialect.release())
            for server in self.servers:
                server.has_released = True

    def restore(self) -> None:
        """Reload the current weights into servers that have released their memory."""
        if self._admission.memory_released and self._present is not None:
            self.update(self._present.folder, self.number(self._present.label) or 0)

    def _regain(self, content: str) -> None:
        """Have servers regain a part of their memory. One that has died is started again when it is
        to take weights, and has all of its memory then. Raises WorkerError."""
        call = self.dialect.regain(content)

        def ask(server: Server) -> None:
            with server.lock:
                problem = self._refusal(server, call) if server.has_released else None
            if problem is not None and content != "weights":
                raise self._failed(server, call, problem) from problem

        self.each(ask)

    def abort(self) -> None:
        """Abort all requests in flight, at most for a few seconds."""
        self.each(lambda server: self._end(server, None, ABORT_S))

    def hang_up(self) -> None:
        """Give up all requests in flight: servers do not answer."""
        for server in self.servers:
            server.endpoint.hang_up()

    def close(self) -> None:
        self._aside.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            server.stop()
