"""Deadlines of requests: each rank has its own clock for each request."""

import pytest

from rlcli.errors import HangError
from rlcli.runtime.messages import Reply
from rlcli.runtime.requests import Requests


class Scripted:
    """Ranks that answer in order, each request after some seconds of a virtual clock; None: never."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 0.0
        self.free = {}
        self.replies = []

    def send(self, rank, request):
        takes = self.seconds[rank, request.op]
        if takes is None or self.free.get(rank, 0.0) is None:
            self.free[rank] = None
        else:
            self.free[rank] = max(self.now, self.free.get(rank, 0.0)) + takes
            self.replies.append((self.free[rank], Reply(request.number, rank, {})))

    def receive(self, deadline, waiting_for, limit=None):
        at, reply = min(self.replies, key=lambda one: one[0], default=(float("inf"), None))
        if at > self.now + deadline:
            self.now += deadline
            raise HangError(f"no answer within {limit:.0f} s: waiting for {waiting_for}")
        self.replies.remove((at, reply))
        self.now = at
        return reply

    def clock(self):
        return self.now


def test_a_silent_rank_is_found_while_others_answer():
    transport = Scripted({(0, "stuck"): None, **{(1, f"op{n}"): 4.0 for n in range(10)}})
    requests = Requests(transport, 2, 10.0)
    requests.post("stuck", {0: {}}, lambda _: None)
    for number in range(10):
        requests.post(f"op{number}", {1: {}}, lambda _: None)
    requests.wait()
    requests.wait()
    with pytest.raises(HangError, match="no answer within 10 s: waiting for stuck on rank 0"):
        requests.wait()
    assert transport.now == 10.0


def test_a_request_is_not_late_while_its_rank_works_on_earlier_ones():
    transport = Scripted({(0, f"op{n}"): 8.0 for n in range(5)})
    requests, done = Requests(transport, 1, 10.0), []
    for number in range(5):
        requests.post(f"op{number}", {0: {}}, done.append)
    while len(done) < 5:
        requests.wait()
    assert transport.now == 40.0


def test_each_request_has_its_own_deadline():
    transport = Scripted({(0, "build"): 50.0, (0, "step"): 50.0})
    requests = Requests(transport, 1, 10.0)
    requests.ask_all("build", deadline=60.0)
    with pytest.raises(HangError, match="no answer within 10 s: waiting for step on rank 0"):
        requests.ask_all("step")
    assert transport.now == 60.0


def test_who_is_named_is_the_rank_that_is_late_not_the_one_that_waits_for_it():
    """Rank 1 has answered the first request, and was asked the second later than rank 0 was the first."""
    transport = Scripted({(0, "first"): None, (1, "first"): 1.0, (1, "second"): None})
    requests = Requests(transport, 2, 10.0)
    requests.post("first", {0: {}, 1: {}}, lambda _: None)
    requests.post("second", {1: {}}, lambda _: None)
    requests.wait()
    with pytest.raises(HangError, match="first on rank 0"):
        requests.wait()
