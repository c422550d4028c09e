"""The master's requests and their outstanding answers."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcli.runtime.messages import COMPUTE, END_LANE, Report, Request
from rlcli.runtime.transport import LAST_REQUEST, Transport

Answers = dict[int, Mapping[str, Any]]
"""Rank → its answer."""

Asked = tuple[int, str]
"""A rank and one of its lanes. Each lane does one thing after the other."""


@dataclass(eq=False)
class Pending:
    """A request to some ranks: those that owe an answer, the answers so far, and what to do with them."""

    number: int
    name: str
    lane: str
    waiting: set[int]
    then: Callable[[Answers], None]
    limit: float
    """Seconds that a rank may take."""
    posted: float
    answers: Answers = field(default_factory=dict)


class Requests:
    """Sends requests and delivers their answers. Every worker handles its requests in the order they were sent here.

    So all workers see parts of one order of operations, and no two can wait for each other. For each rank, the clock of
    a request starts when that rank has answered its previous request: a silent rank is found even if others answer.
    Each lane of a rank has an order of requests and a clock of its own.
    """

    def __init__(self, transport: Transport, world_size: int, deadline: float):
        self._transport = transport
        self._world_size = world_size
        self._deadline = deadline
        self._number = 0
        self._pending: dict[int, Pending] = {}
        self._queues: defaultdict[Asked, deque[Pending]] = defaultdict(deque)
        """The request that each works on, and those after it."""
        self._due: list[tuple[float, int, Asked]] = []
        """A heap of (when, request, who): an answer that would be late then, unless it has arrived meanwhile."""
        self._reports: dict[str, Callable[[Report], None]] = {}
        transport.on_report = self._take

    def post(
        self,
        op: str,
        args: Mapping[int, dict[str, Any]],
        then: Callable[[Answers], None],
        deadline: float | None = None,
        lane: str = COMPUTE,
    ) -> None:
        """Ask ranks, each with its own arguments; `then` runs inside `wait` once all have answered.

        A rank that takes longer than `deadline` seconds ends the run.
        """
        self._number += 1
        requests = {rank: Request(self._number, op, args[rank], lane) for rank in sorted(args)}
        name = next((request.name for request in requests.values()), op)
        limit = self._deadline if deadline is None else deadline
        pending = Pending(self._number, name, lane, set(args), then, limit, self._transport.clock())
        self._pending[self._number] = pending
        for rank, request in requests.items():
            queue = self._queues[rank, lane]
            queue.append(pending)
            if len(queue) == 1:
                self._start_clock((rank, lane), pending.posted)
            self._transport.send(rank, request)

    def listen(self, name: str, take: Callable[[Report], None]) -> None:
        """Have `take` called with each report of that name: inside `wait`, or in the reporting thread of an inline
        worker. It must not raise."""
        self._reports[name] = take

    def wait(self, deadline: float | None = None, report: str = "nothing") -> None:
        """Wait for one more answer or report. Raises the error of a worker, or HangError when the first pending request
        is late.

        If no request is pending, `deadline` (seconds from now) and `report`, what is waited for, apply.
        """
        first = self._first_due()
        if first is not None:
            due, asked, rank = first
            remaining = max(0.0, due - self._transport.clock())
            where = f"rank {rank}" if asked.lane == COMPUTE else f"rank {rank} ({asked.lane})"
            reply = self._transport.receive(remaining, f"{asked.name} on {where}", asked.limit)
        else:
            reply = self._transport.receive(self._deadline if deadline is None else deadline, report)
        if reply is None:
            return
        if reply.failure is not None:
            raise reply.failure.as_error()
        pending = self._pending.get(reply.number)
        if pending is None or reply.rank not in pending.waiting:  # it was cancelled or already answered
            return
        who = reply.rank, pending.lane
        self._queues[who].remove(pending)
        self._start_clock(who, self._transport.clock())
        pending.answers[reply.rank] = reply.value
        pending.waiting.discard(reply.rank)
        if not pending.waiting:
            del self._pending[reply.number]
            pending.then(pending.answers)

    def _start_clock(self, who: Asked, now: float) -> None:
        """Start the clock of the oldest unanswered request, which it begins now."""
        queue = self._queues[who]
        if queue:
            heapq.heappush(self._due, (now + queue[0].limit, queue[0].number, who))

    def _first_due(self) -> tuple[float, Pending, int] | None:
        """(when, what, which rank) of the answer that will be late first."""
        while self._due:
            when, number, who = self._due[0]
            queue = self._queues[who]
            if queue and queue[0].number == number:
                return when, queue[0], who[0]
            heapq.heappop(self._due)
        return None

    def cancel(self) -> None:
        """Stop waiting for answers; reports are still accepted."""
        self._pending.clear()
        self._queues.clear()
        self._due.clear()
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
        lane: str = COMPUTE,
    ) -> Answers:
        """Ask ranks (default: all) the same and wait for their answers."""
        asked = range(self._world_size) if ranks is None else ranks
        return self.ask(op, {rank: args or {} for rank in asked}, deadline, lane)

    def ask(
        self, op: str, args: Mapping[int, dict[str, Any]], deadline: float | None = None, lane: str = COMPUTE
    ) -> Answers:
        """Ask ranks, each with its own arguments, and wait for their answers."""
        box: list[Answers] = []
        self.post(op, args, box.append, deadline, lane)
        while not box:
            self.wait()
        return box[0]

    def let_go(self, lanes: Mapping[str, Sequence[int]]) -> None:
        """Have all workers end, after their other lanes: lane → the ranks that have it."""
        for lane, ranks in lanes.items():
            self.ask_all(END_LANE, ranks=ranks, lane=lane)
        self.ask_all(LAST_REQUEST)
