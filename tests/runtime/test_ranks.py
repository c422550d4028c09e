"""What ranks are asked: in turn, and each with its own clock for each request."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import DataError, HangError
from rlcli.messaging.inline_transport import InlineTransport
from rlcli.messaging.messages import Failure, Reply, Report
from rlcli.runtime.ranks import Ranks, Turns


class Scripted:
    """Ranks that answer in order, each request after some seconds of a virtual clock;
    None: never."""

    def __init__(self, seconds, failures=()):
        self.seconds = seconds
        self.failures = dict(failures)
        self.now = 0.0
        self.free = {}
        self.replies = []
        self.reports = []

    def send(self, rank, request, limit):
        takes = self.seconds[rank, request.op]
        if takes is None or self.free.get(rank, 0.0) is None:
            self.free[rank] = None
        else:
            self.free[rank] = max(self.now, self.free.get(rank, 0.0)) + takes
            failure = self.failures.get(request.op)
            self.replies.append(
                (self.free[rank], Reply(request.number, rank, {"op": request.op}, failure))
            )

    def receive(self, deadline, waiting_for, limit=None):
        if self.reports:
            self.on_report(self.reports.pop())
            return None
        at, reply = min(self.replies, key=lambda arrival: arrival[0], default=(float("inf"), None))
        if at > self.now + deadline:
            self.now += deadline
            raise HangError(
                f"no answer within {limit or deadline:.0f} s: waiting for {waiting_for}"
            )
        self.replies.remove((at, reply))
        self.now = at
        return reply

    def clock(self):
        return self.now


def failure(problem):
    return Failure("DataError", problem, "F80", None, None, "a traceback")


async def ask_each(ranks, *questions):
    """Ask all at once and wait for every answer; (rank, request)."""
    await asyncio.gather(*[ranks.ask(op, {rank: {}}) for rank, op in questions])


def test_a_silent_rank_is_found_while_others_answer():
    transport = Scripted({(0, "stuck"): None, **{(1, f"op{n}"): 4.0 for n in range(10)}})
    ranks = Ranks(transport, 2, 10.0)
    with pytest.raises(HangError, match="no answer within 10 s: waiting for stuck on rank 0"):
        ranks.run(ask_each(ranks, (0, "stuck"), *((1, f"op{n}") for n in range(10))))
    assert transport.now == 10.0


def test_a_request_is_not_late_while_its_rank_works_on_earlier_ones():
    transport = Scripted({(0, f"op{n}"): 8.0 for n in range(5)})
    ranks = Ranks(transport, 1, 10.0)
    ranks.run(ask_each(ranks, *((0, f"op{number}") for number in range(5))))
    assert transport.now == 40.0


def test_each_request_has_its_own_deadline():
    transport = Scripted({(0, "build"): 50.0, (0, "step"): 50.0})
    ranks = Ranks(transport, 1, 10.0)

    async def build_and_step():
        await ranks.ask_all("build", deadline=60.0)
        await ranks.ask_all("step")

    with pytest.raises(HangError, match="no answer within 10 s: waiting for step on rank 0"):
        ranks.run(build_and_step())
    assert transport.now == 60.0


def test_the_late_rank_is_named_and_not_the_one_that_waits_for_it():
    """Rank 1 has answered the first request, and was asked the second later than rank 0 was the
    first."""
    transport = Scripted({(0, "first"): None, (1, "first"): 1.0, (1, "second"): None})
    ranks = Ranks(transport, 2, 10.0)

    async def ask():
        both = ranks.ask("first", {0: {}, 1: {}})
        await ranks.ask("second", {1: {}})
        await both

    with pytest.raises(HangError, match="first on rank 0"):
        ranks.run(ask())


def test_a_request_is_sent_when_it_is_asked_and_not_when_it_is_awaited():
    transport = Scripted({(0, "first"): 1.0, (0, "second"): 1.0})
    ranks = Ranks(transport, 1, 10.0)

    async def ask():
        first, second = ranks.ask("first", {0: {}}), ranks.ask("second", {0: {}})
        assert len(transport.replies) == 2
        return [(await second)[0]["op"], (await first)[0]["op"]]

    assert ranks.run(ask()) == ["second", "first"]


def test_an_error_ends_its_siblings_before_they_are_answered():
    """The error comes after a second; the other rank would take an hour."""
    transport = Scripted({(0, "fails"): 1.0, (1, "slow"): 3600.0}, {"fails": failure("a bad row")})
    ranks, cancelled = Ranks(transport, 2, 10**4), []

    async def slow():
        try:
            await ranks.ask("slow", {1: {}})
        except asyncio.CancelledError:
            cancelled.append("slow")
            raise

    async def both():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(slow())
            tasks.create_task(ask_each(ranks, (0, "fails")))

    with pytest.raises(DataError, match="a bad row"):
        ranks.run(both())
    assert (transport.now, cancelled) == (1.0, ["slow"])


def test_an_error_of_a_request_without_a_waiter_ends_the_run():
    transport = Scripted(
        {(0, "clear"): 1.0, (0, "step"): 5.0}, {"clear": failure("no such sample")}
    )
    ranks = Ranks(transport, 1, 10.0)

    async def step():
        ranks.tell("clear", {0: {}})
        await ranks.ask("step", {0: {}})

    with pytest.raises(DataError, match="no such sample"):
        ranks.run(step())


def test_answers_to_cancelled_requests_are_ignored():
    transport = Scripted({(0, "step"): 1.0}, {"step": failure("another error")})
    ranks = Ranks(transport, 1, 10.0)

    async def cancel_and_wait():
        ranks.tell("step", {0: {}})
        ranks.cancel()
        await ranks.next_report("the files", 5.0)

    with pytest.raises(HangError, match="no answer within 5 s: waiting for the files"):
        ranks.run(cancel_and_wait())


def test_a_report_ends_the_wait_for_one():
    transport = Scripted({})
    ranks, heard = Ranks(transport, 1, 10.0), []
    ranks.listen("written", lambda report: heard.append(report.value))
    transport.reports = [Report(0, "written", {"step": 3})]
    ranks.run(ranks.next_report("the files"))
    assert heard == [{"step": 3}]


def test_in_one_process_the_traceback_of_a_request_shows_who_asked():
    def handle(request):
        raise KeyError("nothing")

    ranks = Ranks(InlineTransport(handle), 1, 10.0)

    async def train_on_a_batch():
        await ranks.ask("step", {0: {}})

    with pytest.raises(KeyError) as raised:
        ranks.run(train_on_a_batch())
    names = [frame.name for frame in raised.traceback]
    assert names.index("train_on_a_batch") < names.index("ask") < names.index("handle")


# -- turns -----------------------------------------------------------------------------------------


def begun_in(order, turns):
    """Numbers of turns in the order in which they begin, if they are waited for in this order."""
    begun = []

    async def wait(number):
        async with turns[number]:
            begun.append(number)

    async def all_of_them():
        waiting = {}
        for number in order:
            waiting[number] = asyncio.create_task(wait(number))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        pending = [task for task in waiting.values() if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    asyncio.run(all_of_them())
    return begun


def test_a_later_turn_waits_for_an_earlier_one_of_its_ranks():
    queue = Turns().queue
    turns = [queue([0, 1]), queue([1, 2])]
    assert begun_in([1], turns) == []
    assert begun_in([0], turns) == [0]
    assert begun_in([1], turns) == [1]


def test_turns_of_other_ranks_and_of_none_begin_at_once():
    queue = Turns().queue
    assert begun_in([1, 2], [queue([0]), queue([1]), queue([])]) == [1, 2]


def test_a_turn_that_is_widened_comes_before_later_ones_of_its_new_ranks():
    """The copy of weights is for both ranks; until it can begin,
    the follower need not wait for it."""
    turns = Turns()
    train, copy, critic = turns.queue([0]), turns.queue([0]), turns.queue([0, 1])
    assert begun_in([0], [turns.queue([1])]) == []  # behind the critic's
    assert begun_in([0], [train]) == [0]
    turns.widen(copy, [0, 1])
    assert begun_in([1, 0], [copy, critic]) == [0, 1]


def test_a_turn_that_is_left_out_lets_the_others_begin():
    turns = Turns()
    first, left_out, last = turns.queue([0]), turns.queue([0]), turns.queue([0])
    turns.end(left_out)
    assert begun_in([1, 0], [first, last]) == [0, 1]


@given(
    st.lists(st.sets(st.integers(0, 3)), max_size=8).flatmap(
        lambda calls: st.tuples(st.just(calls), st.permutations(range(len(calls))))
    )
)
def test_every_turn_begins_once_and_each_rank_has_its_turns_in_order(case):
    of_turns, arrivals = case
    turns, begun = Turns(), []
    queued = [turns.queue(ranks) for ranks in of_turns]

    async def wait(number):
        async with queued[number]:
            begun.append(number)

    async def wait_for_all():
        async with asyncio.TaskGroup() as tasks:
            for number in arrivals:
                tasks.create_task(wait(number))

    asyncio.run(wait_for_all())
    assert sorted(begun) == list(range(len(queued)))
    for rank in range(4):
        of_rank = [number for number in begun if rank in of_turns[number]]
        assert of_rank == sorted(of_rank)
