"""Requests as plain calls, for a run in one process."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from rlcli.errors import HangError
from rlcli.messaging.messages import (
    COMPUTE,
    Failure,
    Fields,
    Handle,
    Listener,
    Reply,
    Report,
    Request,
)
from rlcli.messaging.transport import CHECK_SECONDS, ignore, reply_to, timed_reply_to


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
                self._replies.put(timed_reply_to(request, rank, self._handle))
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
            self._replies.put(reply_to(self._lanes[lane].get(), 0, self._handle, failure))

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
