"""Which requests several servers are given, and when.

Requests are admitted unless they are held back, or a failure has ended all. What has an effect on
the servers themselves is in `_server_pool`; which server a request goes to is decided in
`_server_balance`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rlcli.errors import HangError, RlcliError

from ._server_balance import Balance, Flight
from ._server_dialect import ResponseRequest

LOOK_AGAIN_S = 1.0
"""Seconds between checks whether a request that waits for admission is still wanted."""

Ready = Callable[[], Sequence[int]]
"""Tells which servers take requests."""


class RequestAdmission:
    """The requests in flight. Many threads may use it."""

    def __init__(self, servers: int, ready: Ready, deadline: float):
        """`deadline`: seconds until requests in flight must have ended, if that is awaited."""
        self._ready = ready
        self._deadline = deadline
        self._changed = threading.Condition()
        self._balance = Balance(servers)
        self._holds = 0
        self._failure: RlcliError | None = None
        self.memory_released = False
        """Whether the servers' memory is given back: then nobody may request anything."""
        self.updates = 0
        """How many times all servers have taken new weights."""

    # -- requests ----------------------------------------------------------------------------------

    def admit(self, request: ResponseRequest, stop: threading.Event) -> Flight | None:
        """Wait until a server is there for a request; None once `stop` is set. Raises the failure
        that has ended all."""
        with self._changed:
            while not stop.is_set():
                can_move = request.taken_at != self.updates
                self.check()
                if self.memory_released and not self._holds:
                    raise RuntimeError("servers got a request while their memory is released")
                number = None if self._holds else self._choose(request, can_move)
                if number is not None:
                    now = time.monotonic()
                    return self._balance.begin(number, request.id, now, request.prompt, can_move)
                self._changed.wait(LOOK_AGAIN_S)
            return None

    def _choose(self, request: ResponseRequest, can_move: bool) -> int | None:
        return self._balance.choose(self._ready(), time.monotonic(), request.prompt, can_move)

    def end(self, flight: Flight, text: Sequence[int], tokens: int | None) -> list[Flight]:
        """A request has ended, with so many tokens if it was answered; `text`: prompt and response.
        Returns what is to be taken from its server."""
        with self._changed:
            taken = self._balance.end(flight, time.monotonic(), text, tokens)
            self._changed.notify_all()
            return taken

    def overdue(self, slow_only: bool) -> list[Flight]:
        """What is to be taken from servers that have been silent for too long."""
        with self._changed:
            if self._holds:
                return []
            return self._balance.overdue(time.monotonic(), slow_only)

    # -- servers -----------------------------------------------------------------------------------

    @contextmanager
    def hold(self, drained: bool = True) -> Iterator[None]:
        """Admit no request; with `drained`, also wait until none is in flight. Raises HangError."""
        with self._changed:
            self._holds += 1
            end = time.monotonic() + self._deadline
            while drained and self._balance.in_flight:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    self._holds -= 1
                    raise HangError(
                        "requests are still in flight, so the servers cannot take new weights",
                        code="F91",
                    )
        began = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                if not self._holds:  # an update holds them while they are paused
                    self._balance.resumed(time.monotonic() - began)
                self._changed.notify_all()

    def weights_changed(self) -> None:
        """All servers have new weights."""
        with self._changed:
            self.updates += 1
            self._balance.weights_changed()

    def started(self, server: int) -> None:
        """A server was started again."""
        with self._changed:
            self._balance.started(server)
            self._changed.notify_all()

    def fail(self, error: RlcliError) -> None:
        """Admit nothing any more."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the failure that has ended all, if there is one."""
        if self._failure is not None:
            raise self._failure
