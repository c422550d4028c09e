"""The ranks as the master sees them: what they are asked and in which order,
and when an answer is late.

The master is a set of coroutines. Whenever none of them can continue,
it waits for the next answer of a rank.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlcli.api.headway import current_listener
from rlcli.errors import RlcliError
from rlcli.messaging.messages import (
    COMPUTE,
    COUNTED,
    END_LANE,
    LAST_REQUEST,
    Fields,
    Listener,
    Reply,
    Report,
    Request,
)
from rlcli.messaging.transport import Transport, ignore
from rlcli.runtime.call_times import CallTimes
from rlcli.runtime.clocks import Clocks
from rlcli.runtime.rank_counts import RankCounts
from rlcli.runtime.rank_times import RankTimes

T = TypeVar("T")

Answers = dict[int, Mapping[str, Any]]
"""Rank → its answer; to a request of a call, with the `seconds` that it took."""

Asked = tuple[int, str]
"""A rank and one of its lanes. Each lane does one thing after the other."""


@dataclass(eq=False)
class PendingRequest:
    """A request to some ranks: those that owe an answer, and the answers so far."""

    number: int
    name: str
    lane: str
    waiting: set[int]
    limit: float
    """Seconds that a rank may take."""
    answered: asyncio.Future[Answers] | None
    """None if nobody waits for the answers."""
    answers: Answers = field(default_factory=dict)


class Ranks:
    """Asks ranks. Every worker handles its requests in the order in which they were sent here.

    So all workers see parts of one order of operations, and no two can wait for each other. For
    each rank, the clock of a request starts when that rank has answered its previous request: a
    silent rank is found even if others answer. Each lane of a rank has an order of requests and a
    clock of its own.
    """

    def __init__(
        self,
        transport: Transport,
        world_size: int,
        deadline: float,
        ranks_per_node: int | None = None,
    ):
        """`ranks_per_node`: None if all ranks are on the master's node."""
        self.turns = Turns()
        self.times = RankTimes(Clocks(ranks_per_node or world_size))
        self._transport = transport
        self._world_size = world_size
        self._deadline = deadline
        self._number = 0
        self._questions: dict[int, PendingRequest] = {}
        self._queues: defaultdict[Asked, deque[PendingRequest]] = defaultdict(deque)
        """What each lane works on, and what it was asked after that."""
        self._due: list[tuple[float, int, Asked]] = []
        """A heap of (when, question, who): an answer that would be late then,
        unless it has arrived meanwhile."""
        self._listeners: dict[str, Listener] = {}
        self._awaited: tuple[asyncio.Future[None], str, float] | None = None
        """Resolved by the next report; what it is, and the seconds that it may take."""
        if (listener := current_listener()) is not None:
            self.listen(COUNTED, RankCounts(listener).take)
        transport.on_report = self._take_report

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the master to its end. Raises the first error of its tasks, the error
        of a worker, or HangError when an answer is late."""
        with asyncio.Runner(loop_factory=lambda: _MasterLoop(self._wait)) as runner:
            try:
                return runner.get_loop().run_until_complete(work)
            except BaseExceptionGroup as group:
                error = _first(group)
        raise error

    def ask(
        self,
        op: str,
        args: Mapping[int, Fields],
        deadline: float | None = None,
        lane: str = COMPUTE,
        call: CallTimes | None = None,
    ) -> Awaitable[Answers]:
        """Send a request to ranks, at once, each with its own arguments;
        await the result for their answers.

        A rank that takes longer than `deadline` seconds ends the run. `call`: the one that the
        request belongs to.
        """
        answered: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        if args:
            self._send(op, args, deadline, lane, answered, call)
        else:
            answered.set_result({})
        return answered

    def ask_all(
        self,
        op: str,
        args: Fields | None = None,
        deadline: float | None = None,
        ranks: Sequence[int] | None = None,
        lane: str = COMPUTE,
        call: CallTimes | None = None,
    ) -> Awaitable[Answers]:
        """Ask ranks (default: all) the same."""
        asked = range(self._world_size) if ranks is None else ranks
        return self.ask(op, {rank: args or {} for rank in asked}, deadline, lane, call)

    def tell(self, op: str, args: Mapping[int, Fields]) -> None:
        """Send a request whose answers are of no interest; an error still ends the run."""
        self._send(op, args, None, COMPUTE, None)

    def listen(self, name: str, take: Listener) -> None:
        """Have `take` called with each report of that name: inside `run`, or in the reporting
        thread of an inline worker. It must not raise."""
        self._listeners[name] = take

    def are_busy(self, ranks: Iterable[int]) -> bool:
        """Whether some of these ranks have not answered all they were asked."""
        return any(self._queues[rank, COMPUTE] for rank in ranks)

    async def next_report(self, awaited: str, deadline: float | None = None) -> None:
        """Wait for any report. If nothing else is waited for, raises HangError, which says what
        was `awaited`, after `deadline` seconds."""
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited = arrived, awaited, self._deadline if deadline is None else deadline
        try:
            await arrived
        finally:
            self._awaited = None

    def cancel(self) -> None:
        """Stop waiting for answers; reports are still accepted."""
        self._questions.clear()
        self._queues.clear()
        self._due.clear()
        self.times.cancel()

    async def let_go(self, lanes: Mapping[str, Sequence[int]]) -> None:
        """Have all workers end, after their other lanes: lane → the ranks that have it."""
        for lane, ranks in lanes.items():
            await self.ask_all(END_LANE, ranks=ranks, lane=lane)
        await self.ask_all(LAST_REQUEST)

    def _send(
        self,
        op: str,
        args: Mapping[int, Fields],
        deadline: float | None,
        lane: str,
        answered: asyncio.Future[Answers] | None,
        call: CallTimes | None = None,
    ) -> None:
        self._number += 1
        requests = {rank: Request(self._number, op, args[rank], lane) for rank in sorted(args)}
        name = next(iter(requests.values())).name
        limit = self._deadline if deadline is None else deadline
        question = self._questions[self._number] = PendingRequest(
            self._number, name, lane, set(args), limit, answered
        )
        self.times.sent(self._number, op, name, lane, requests, call)
        now = self._transport.clock()
        for rank, request in requests.items():
            queue = self._queues[rank, lane]
            queue.append(question)
            if len(queue) == 1:
                self._start_clock((rank, lane), now)
            self._transport.send(rank, request, limit)

    # -- answers -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for answers or reports until some coroutine can continue."""
        can_continue = False
        while not can_continue:
            try:
                reply = self._receive()
            except RlcliError as error:
                if self._questions or not self._end_wait_for_report(error):
                    raise
                return
            can_continue = (
                self._end_wait_for_report() if reply is None else self._take_answer(reply)
            )

    def _receive(self) -> Reply | None:
        """The next answer; None for a report. Raises HangError when the first answer that is due is
        late."""
        first = self._first_due()
        if first is None:
            _, awaited, deadline = self._awaited or (None, "nothing", self._deadline)
            return self._transport.receive(deadline, awaited)
        due, question, rank = first
        lane = "" if question.lane == COMPUTE else f" ({question.lane})"
        remaining = max(0.0, due - self._transport.clock())
        return self._transport.receive(
            remaining, f"{question.name} on rank {rank}{lane}", question.limit
        )

    def _take_answer(self, reply: Reply) -> bool:
        """Record an answer; True if it was the last that somebody waits for, or an error."""
        question = self._questions.get(reply.number)
        # it was cancelled or already answered
        if question is None or reply.rank not in question.waiting:
            return False
        answered = question.answered
        is_awaited = answered is not None and not answered.done()
        if reply.failure is not None:
            error = reply.failure.as_error()
            if answered is None or not is_awaited:
                raise error
            answered.set_exception(error)
            return True
        who = reply.rank, question.lane
        self._queues[who].remove(question)
        self._start_clock(who, self._transport.clock())
        seconds = self.times.answered(reply.number, *who, reply.timing)
        question.answers[reply.rank] = reply.value | seconds
        question.waiting.discard(reply.rank)
        if question.waiting:
            return False
        del self._questions[reply.number]
        if answered is not None and is_awaited:
            answered.set_result(question.answers)
        return is_awaited

    def _end_wait_for_report(self, error: RlcliError | None = None) -> bool:
        """Wake whoever waits for a report, with an error if there is one; False if nobody does."""
        if self._awaited is None or self._awaited[0].done():
            return False
        if error is None:
            self._awaited[0].set_result(None)
        else:
            self._awaited[0].set_exception(error)
        return True

    def _start_clock(self, who: Asked, now: float) -> None:
        """Start the clock of the oldest unanswered question, which it begins now."""
        queue = self._queues[who]
        if queue:
            heapq.heappush(self._due, (now + queue[0].limit, queue[0].number, who))

    def _first_due(self) -> tuple[float, PendingRequest, int] | None:
        """(when, what, which rank) of the answer that will be late first."""
        while self._due:
            when, number, who = self._due[0]
            queue = self._queues[who]
            if queue and queue[0].number == number:
                return when, queue[0], who[0]
            heapq.heappop(self._due)
        return None

    def _take_report(self, report: Report) -> None:
        self._listeners.get(report.name, ignore)(report)


class Turns:
    """The order in which ranks get their requests: it decides which weights a call sees, and which
    collectives match up. A turn is queued for all of its ranks at the same time, so all ranks see
    parts of one order."""

    def __init__(self) -> None:
        self._queues: defaultdict[int, deque[Turn]] = defaultdict(deque)
        self._number = 0

    def queue(self, ranks: Iterable[int]) -> Turn:
        """The next turn of these ranks."""
        self._number += 1
        turn = Turn(self, self._number, frozenset(ranks))
        for rank in turn.ranks:
            self._queues[rank].append(turn)
        return turn

    def widen(self, turn: Turn, ranks: Iterable[int]) -> None:
        """Have more ranks take part in a turn that has not begun:
        on these too it comes before all later ones."""
        for rank in set(ranks) - turn.ranks:
            queue = self._queues[rank]
            queue.insert(sum(earlier.number < turn.number for earlier in queue), turn)
        turn.ranks |= frozenset(ranks)

    def is_first(self, turn: Turn) -> bool:
        """Whether no earlier turn is left on any of its ranks."""
        return all(self._queues[rank][0] is turn for rank in turn.ranks)

    def end(self, turn: Turn) -> None:
        """Let the turns after it begin; it may be left out."""
        for rank in turn.ranks:
            self._queues[rank].remove(turn)
        for later in {self._queues[rank][0] for rank in turn.ranks if self._queues[rank]}:
            if later.may_begin is not None and not later.may_begin.done() and self.is_first(later):
                later.may_begin.set_result(None)


class Turn:
    """`async with turn:` waits for the earlier turns of its ranks.
    What is sent meanwhile is sent in turn."""

    def __init__(self, turns: Turns, number: int, ranks: frozenset[int]):
        self.number = number
        """Its place in the order of all turns."""
        self.ranks = ranks
        self.may_begin: asyncio.Future[None] | None = None
        """Where it is waited for."""
        self._turns = turns

    async def __aenter__(self) -> None:
        if not self._turns.is_first(self):
            self.may_begin = asyncio.get_running_loop().create_future()
            await self.may_begin

    async def __aexit__(self, *error: object) -> None:
        self._turns.end(self)


class _MasterLoop(asyncio.BaseEventLoop):
    """Runs the master's coroutines. When none of them can continue, it waits for ranks, the only
    thing that happens outside the master. There are no timers: deadlines are those of requests.

    It has no descriptors, unlike asyncio's own loops: a component that closes files which it has
    not opened would take them away.
    """

    def __init__(self, wait: Callable[[], None]):
        super().__init__()
        self._wait = wait
        self._selector = self

    def select(self, timeout: float | None = None) -> list[Any]:
        """Wait, unless some coroutine can continue at once (`timeout` 0)."""
        if timeout is None or timeout > 0:
            self._wait()
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: answers resolve futures."""

    def _write_to_self(self) -> None:
        """No other thread schedules anything here."""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that made the others be cancelled."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
