"""Requests to a worker of the same process: plain calls."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlcli.errors import HangError
from rlcli.runtime.messages import COMPUTE, Failure, Reply, Report, Request
from rlcli.runtime.transport import CHECK_SECONDS, ignore


class InlineTransport:
    """A request is a plain call in this process, made where it is sent: a debugger and a traceback show who asked.
    Lanes other than COMPUTE have a thread each.

    `waiting` is entered around each call with its name and deadline: only another process can end the call. `check`
    runs before each call: it raises when processes that belong to the run have ended.
    """

    def __init__(
        self,
        handle: Callable[[Request], dict[str, Any]],
        waiting: Callable[[str, float], AbstractContextManager[None]] = lambda what, deadline: nullcontext(),
        check: Callable[[], None] = lambda: None,
    ):
        self._handle = handle
        self._waiting = waiting
        self._check = check
        self._lanes: dict[str, queue.SimpleQueue[Request]] = {}
        self._heard: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        """Replies; None for a report."""
        self.on_report: Callable[[Report], None] = ignore

    def report(self, name: str, value: dict[str, Any], failure: Failure | None = None) -> None:
        """The worker's end; any of its threads may call it."""
        self.on_report(Report(0, name, value, failure))
        self._heard.put(None)

    def send(self, rank: int, request: Request, limit: float = 0.0) -> None:
        if request.lane == COMPUTE:
            self._check()
            with self._waiting(f"{request.name} on rank {rank}", limit):
                self._heard.put(Reply(request.number, rank, self._handle(request)))
            return
        if request.lane not in self._lanes:
            self._lanes[request.lane] = queue.SimpleQueue()
            threading.Thread(target=self._serve_lane, args=(request.lane,), name=request.lane, daemon=True).start()
        self._lanes[request.lane].put(request)

    def _serve_lane(self, lane: str) -> None:
        while True:
            request = self._lanes[lane].get()
            try:
                reply = Reply(request.number, 0, self._handle(request))
            except Exception as error:
                reply = Reply(request.number, 0, failure=Failure.of(error, lane, traceback.format_exc()))
            self._heard.put(reply)

    def receive(self, deadline: float, waiting_for: str, limit: float | None = None) -> Reply | None:
        self._check()
        with contextlib.suppress(queue.Empty):
            return self._heard.get_nowait()
        end = time.monotonic() + deadline
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._heard.get(timeout=min(left, CHECK_SECONDS))
            self._check()
        raise HangError(f"no answer within {deadline:.0f} s: waiting for {waiting_for}")

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Do nothing: the process is its own."""
