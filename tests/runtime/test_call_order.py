"""Calls of the same ranks start in the order in which they were added, whatever the order of their inputs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.runtime.call_order import CallOrder, Pending


@pytest.fixture
def started():
    return []


def add(order, started, name, *ranks, role="actor"):
    call = Pending(role, ranks, lambda: started.append(name))
    order.add(call)
    return call


def test_a_later_call_waits_for_an_earlier_one_of_its_ranks(started):
    order = CallOrder()
    first, second = add(order, started, "first", 0, 1), add(order, started, "second", 1, 2)
    order.inputs_are_there(second)
    assert started == []
    order.inputs_are_there(first)
    assert started == ["first", "second"]


def test_calls_of_other_ranks_and_of_none_start_at_once(started):
    order = CallOrder()
    add(order, started, "waits", 0)
    for call in (add(order, started, "elsewhere", 1), add(order, started, "in a pool")):
        order.inputs_are_there(call)
    assert started == ["elsewhere", "in a pool"]


def test_giving_way_lets_calls_of_other_roles_go_first_and_none_of_its_own(started):
    order = CallOrder()
    copy = add(order, started, "copy", 0)
    own, other = add(order, started, "own", 0), add(order, started, "other", 0, role="critic")
    order.give_way(copy)
    for call in (own, copy, other):
        order.inputs_are_there(call)
    assert started == ["other", "copy", "own"]


@given(st.lists(st.sets(st.integers(0, 3)), max_size=8).flatmap(
    lambda calls: st.tuples(st.just(calls), st.permutations(range(len(calls))))
))  # fmt: skip
def test_every_call_starts_once_and_each_rank_starts_its_calls_in_order(case):
    ranks, arrivals = case
    order, started = CallOrder(), []
    calls = [add(order, started, number, *of_call) for number, of_call in enumerate(ranks)]
    for number in arrivals:
        order.inputs_are_there(calls[number])
    assert sorted(started) == list(range(len(calls)))
    for rank in range(4):
        of_rank = [number for number in started if rank in ranks[number]]
        assert of_rank == sorted(of_rank)
