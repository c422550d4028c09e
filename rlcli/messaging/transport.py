"""What every transport offers the master, and how a worker comes to its reply.

Requests travel over ZeroMQ (`zmq_master`, `zmq_worker`), where every message carries the run's
random token and `control` decides who may connect, or are plain calls in one process
(`inline_transport`).
"""

from __future__ import annotations

from typing import Protocol

from rlcli.api.timing import recorded
from rlcli.messaging.messages import FailureOf, Handle, Listener, Reply, Report, Request

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


def reply_to(request: Request, rank: int, handle: Handle, failure: FailureOf) -> Reply:
    """The reply, with the failure if `handle` raises."""
    try:
        return timed_reply_to(request, rank, handle)
    except Exception as error:
        return Reply(request.number, rank, failure=failure(error))


def timed_reply_to(request: Request, rank: int, handle: Handle) -> Reply:
    """The reply, with the time that it took. Raises what `handle` raises."""
    with recorded() as timing:
        value = handle(request)
    return Reply(request.number, rank, value, timing=timing.as_json())


def ignore(report: Report) -> None:
    """Discard a report: nobody listens."""
