"""Which server a request goes to, and what is taken from a slow one."""

import threading
from types import SimpleNamespace

import pytest

from rlcli.backends._server_admission import RequestAdmission
from rlcli.backends._server_balance import AHEAD, BLOCK, FIRST_REST_S, Balance
from rlcli.backends._server_dialect import ResponseRequest, new_id

SERVERS = 3
LATER = 1000.0
"""When a slow server may be tried again."""


@pytest.fixture
def balance():
    return Balance(SERVERS)


def answered(balance, server, seconds, tokens=100, now=0.0):
    """A request to a server that takes so long; returns what is taken from it then."""
    flight = balance.begin(server, f"{server}-{now}-{seconds}", now)
    return balance.end(flight, now + seconds, tokens=tokens)


def with_answers(balance, servers=range(SERVERS), seconds=1.0):
    for server in servers:
        for _ in range(4):
            answered(balance, server, seconds)
    return balance


def in_flight(balance, server, *ids, now=0.0):
    return [balance.begin(server, id_, now) for id_ in ids]


def ids(flights):
    return [flight.id for flight in flights]


def test_a_request_goes_to_the_least_busy_server(balance):
    in_flight(balance, 0, "a", "b")
    in_flight(balance, 1, "c")
    assert balance.choose([0, 1, 2], LATER) == 2
    assert balance.choose([0, 1], LATER) == 1


def test_a_slow_server_has_all_its_responses_taken(balance):
    with_answers(balance)
    in_flight(balance, 0, "a", "b")
    assert ids(answered(balance, 0, 40.0, now=1.0)) == ["a", "b"]


def test_a_response_is_taken_once_until_the_weights_change(balance):
    with_answers(balance)
    in_flight(balance, 0, "a")
    balance.begin(0, "b", 0.0, can_move=False)
    assert ids(answered(balance, 0, 40.0)) == ["a"]
    assert ids(answered(balance, 0, 40.0)) == []
    balance.weights_changed()
    assert ids(answered(balance, 0, 40.0)) == ["b"], "the other one is still being taken"


def test_a_slow_server_gets_a_single_request_now_and_then_and_none_that_was_taken(balance):
    with_answers(balance)
    answered(balance, 0, 40.0)
    in_flight(balance, 1, "a")
    in_flight(balance, 2, "b")
    assert balance.choose(range(SERVERS), 41.0) == 1
    assert balance.choose(range(SERVERS), LATER, can_move=False) == 1
    assert balance.choose(range(SERVERS), LATER) == 0
    in_flight(balance, 0, "c", now=LATER)
    in_flight(balance, 1, "d")
    assert balance.choose(range(SERVERS), LATER) == 2
    assert balance.choose([0], LATER) is None


def test_a_server_that_seemed_slow_once_is_tried_again_soon(balance):
    with_answers(balance)
    answered(balance, 0, 40.0)
    in_flight(balance, 1, "a")
    in_flight(balance, 2, "b")
    assert balance.choose(range(SERVERS), 40.0 + FIRST_REST_S - 1) == 1
    assert balance.choose(range(SERVERS), 40.0 + FIRST_REST_S) == 0


def test_a_server_that_stays_slow_is_tried_less_and_less_often(balance):
    with_answers(balance)
    in_flight(balance, 1, "a")
    in_flight(balance, 2, "b")
    now, rests = 0.0, []
    for _ in range(8):
        answered(balance, 0, 40.0, now=now)
        now += 40.0
        began = now
        while balance.choose(range(SERVERS), now) != 0:
            now += 1.0
        rests.append(now - began)
    assert rests == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]


def test_a_server_that_is_as_fast_as_others_again_gets_as_many_requests(balance):
    with_answers(balance)
    answered(balance, 0, 40.0)
    in_flight(balance, 1, "a")
    in_flight(balance, 2, "b")
    answered(balance, 0, 30.0, now=LATER)
    assert balance.choose(range(SERVERS), LATER + 31.0) == 1
    answered(balance, 0, 1.0, now=2 * LATER)
    assert balance.choose(range(SERVERS), 2 * LATER + 1.0) == 0


def test_a_server_that_was_started_again_is_not_slow(balance):
    with_answers(balance)
    answered(balance, 0, 40.0)
    in_flight(balance, 0, "a")
    assert balance.choose([0], LATER) is None
    balance.started(0)
    assert balance.choose([0], LATER) == 0


@pytest.mark.parametrize(
    ("seconds", "tokens"), [(2.0, 100), (0.6, 1), (0.1, 0)], ids=["twice", "short", "milliseconds"]
)
def test_servers_differ_a_little_without_consequences(balance, seconds, tokens):
    with_answers(balance)
    in_flight(balance, 0, "a")
    for _ in range(4):
        assert answered(balance, 0, seconds, tokens=tokens) == []


def test_a_single_server_is_never_slow():
    balance = with_answers(Balance(1), [0])
    in_flight(balance, 0, "a")
    assert answered(balance, 0, 1000.0) == []
    assert balance.overdue(1e6) == []


def test_a_silent_server_has_its_oldest_response_taken(balance):
    """Its tokens show whether it is slow: one that is not keeps the others."""
    with_answers(balance)
    oldest, _ = in_flight(balance, 0, "a", "b", now=1.0)
    assert balance.overdue(10.0) == []
    assert ids(balance.overdue(12.0)) == ["a"]
    assert balance.overdue(100.0) == [], "one at a time"
    assert balance.end(oldest, 12.0, tokens=1100) == []
    assert balance.overdue(21.0) == []
    assert ids(balance.overdue(23.0)) == ["b"]


def test_of_silent_servers_those_that_are_known_to_be_slow_are_asked_first(balance):
    with_answers(balance)
    answered(balance, 0, 40.0)
    in_flight(balance, 0, "a", now=50.0)
    in_flight(balance, 1, "b", now=50.0)
    assert ids(balance.overdue(100.0, slow_only=True)) == ["a"]


def test_the_other_responses_of_a_silent_server_follow_if_it_is_slow(balance):
    with_answers(balance)
    oldest, *_ = in_flight(balance, 0, "a", "b", "c", now=1.0)
    assert ids(balance.overdue(12.0)) == ["a"]
    assert ids(balance.end(oldest, 12.0, tokens=30)) == ["b", "c"]


def test_a_long_pause_for_new_weights_makes_no_server_slow_or_silent(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("rlcli.backends._server_admission.time", clock)
    admission = RequestAdmission(SERVERS, lambda: range(SERVERS), deadline=1.0)

    def begin(count):
        requests = [ResponseRequest([], {}, 100, 0, new_id()) for _ in range(count)]
        return [admission.admit(request, threading.Event()) for request in requests]

    def end(flights):
        clock.now += 1.0
        return [flight for each in flights for flight in admission.end(each, [], 100)]

    for _ in range(4):
        assert end(begin(SERVERS)) == []
    flights = begin(2 * SERVERS)
    with admission.hold(drained=False):
        clock.now += 30.0
        with admission.hold(drained=False):
            clock.now += 30.0
    assert admission.overdue(slow_only=False) == []
    assert end(flights) == []


def test_every_server_may_be_as_slow_as_the_others(balance):
    with_answers(balance)
    in_flight(balance, 0, "a")
    for server in (1, 2):
        for _ in range(4):
            answered(balance, server, 10.0)
    assert answered(balance, 0, 10.0) == []


# -- prefixes --------------------------------------------------------------------------------------

PROMPT = list(range(3 * BLOCK + 5))


def test_responses_to_one_prompt_go_to_one_server(balance):
    in_flight(balance, 0, "a")
    balance.begin(1, "b", 0.0, PROMPT)
    in_flight(balance, 1, "c", "d")
    assert balance.choose(range(SERVERS), LATER, PROMPT) == 1
    assert balance.choose(range(SERVERS), LATER, PROMPT[1:]) == 2


def test_the_next_turn_of_a_conversation_goes_to_the_server_of_the_last(balance):
    flight = balance.begin(1, "a", 0.0, PROMPT)
    text = [*PROMPT, *range(500, 600)]
    balance.end(flight, 1.0, text, tokens=100)
    assert balance.choose(range(SERVERS), LATER, [*text, *range(700, 730)]) == 1
    assert balance.choose(range(SERVERS), LATER, [*PROMPT[:BLOCK], *range(800, 900)]) == 0, (
        "too little"
    )


def test_a_full_server_or_one_that_is_down_gives_its_conversations_up(balance):
    balance.begin(1, "a", 0.0, PROMPT)
    assert balance.choose([0, 2], LATER, PROMPT) == 0
    in_flight(balance, 1, *map(str, range(AHEAD - 1)))
    assert balance.choose(range(SERVERS), LATER, PROMPT) == 0


@pytest.mark.parametrize("ends", [Balance.weights_changed, lambda balance: balance.started(1)])
def test_new_weights_and_a_new_start_discard_prefixes(balance, ends):
    balance.begin(1, "a", 0.0, PROMPT)
    ends(balance)
    assert balance.choose(range(SERVERS), LATER, PROMPT) == 0


def test_few_prefixes_are_remembered(balance, monkeypatch):
    monkeypatch.setattr("rlcli.backends._server_balance.HELD", 10)
    balance.begin(1, "a", 0.0, PROMPT)
    for number in range(10):
        flight = balance.begin(2, f"{number}", 0.0, [number])
        balance.end(flight, 0.0)
    assert balance.choose(range(SERVERS), LATER, PROMPT) == 0
