"""What the master has asked and what is still unanswered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcli.runtime.messages import Report, Request
from rlcli.runtime.transport import Transport

Answers = dict[int, Mapping[str, Any]]
"""Rank → what it answered."""


@dataclass
class Pending:
    """A request to some ranks: those that owe an answer, the answers so far, and what to do with them."""

    name: str
    waiting: set[int]
    then: Callable[[Answers], None]
    answers: Answers = field(default_factory=dict)


class Requests:
    """Sends requests and hands out their answers. Every worker takes its requests in the order they were sent here.

    So all workers see parts of one order of operations, and no two can wait for each other.
    """

    def __init__(self, transport: Transport, world_size: int, deadline: float):
        self._transport = transport
        self._world_size = world_size
        self._deadline = deadline
        self._number = 0
        self._pending: dict[int, Pending] = {}
        self._reports: dict[str, Callable[[Report], None]] = {}
        transport.on_report = self._take

    def post(self, op: str, args: Mapping[int, dict[str, Any]], then: Callable[[Answers], None]) -> None:
        """Ask ranks, each with arguments of its own; `then` runs inside `wait` once all have answered."""
        self._number += 1
        requests = {rank: Request(self._number, op, args[rank]) for rank in sorted(args)}
        name = next((request.name for request in requests.values()), op)
        self._pending[self._number] = Pending(name, set(args), then)
        for rank, request in requests.items():
            self._transport.send(rank, request)

    def listen(self, name: str, take: Callable[[Report], None]) -> None:
        """Have `take` called with each report of that name: inside `wait`, or in the thread of an inline worker that
        reports. It must not raise."""
        self._reports[name] = take

    def wait(self, deadline: float | None = None, report: str = "nothing") -> None:
        """Until one more answer or report is in. Raises what a worker raised, HangError after `deadline` seconds.

        `report`: what is waited for where nothing was asked.
        """
        oldest = self._pending[min(self._pending)] if self._pending else None
        what = f"{oldest.name} on rank {min(oldest.waiting)}" if oldest else report
        reply = self._transport.receive(self._deadline if deadline is None else deadline, what)
        if reply is None:
            return
        if reply.failure is not None:
            raise reply.failure.as_error()
        pending = self._pending.get(reply.number)
        if pending is None:  # it was cancelled
            return
        pending.answers[reply.rank] = reply.value
        pending.waiting.discard(reply.rank)
        if not pending.waiting:
            del self._pending[reply.number]
            pending.then(pending.answers)

    def cancel(self) -> None:
        """Stop waiting for answers; reports are still taken."""
        self._pending.clear()
        self._transport.cancel()

    def _take(self, report: Report) -> None:
        take = self._reports.get(report.name)
        if take is not None:
            take(report)

    def ask_all(
        self,
        op: str,
        args: dict[str, Any] | None = None,
        deadline: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Answers:
        """Ask ranks (default: all) the same and wait for their answers."""
        asked = range(self._world_size) if ranks is None else ranks
        box: list[Answers] = []
        self.post(op, {rank: args or {} for rank in asked}, box.append)
        while not box:
            self.wait(deadline)
        return box[0]
