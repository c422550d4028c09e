"""Which samples a step trains on, and what becomes of the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.dataflow import MFCDef, ModelInterfaceType
from rlcli.errors import DataError, UsageError
from rlcli.runtime.data_order import DataOrder
from rlcli.runtime.sample_flow import Draw, SampleFlow, SampleQueue


def call(name, inputs, outputs=(), drops=(), kind=ModelInterfaceType.INFERENCE):
    return MFCDef(
        name=name, model_name="role", interface_type=kind, interface_impl=ModelInterfaceAbstraction("x"),
        input_keys=inputs, output_keys=outputs, drops=drops,
    )  # fmt: skip


GRAPH = [
    call("gen", ("prompts",), ("ids",)),
    call("score", ("ids",), ("rewards",), drops=("unscored",)),
    call("look", ("ids",), ("values",)),
    call("choose", ("rewards",), ("chosen",), drops=("equal", "long")),
    call("late", ("chosen",), ("advice",)),
    call("train", ("ids", "rewards", "values"), kind=ModelInterfaceType.TRAIN_STEP),
]


def flow_of(rows=100, graph=GRAPH, place=0, returned=(), **settings):
    queue = SampleQueue(DataOrder(rows, seed=1, shuffle=False), place, returned)
    return SampleFlow(queue, graph, **{"replaces": True, "most_redraws": 10, **settings})


def ids(*rows):
    return [f"e0r{row}" for row in rows]


def rows(draws):
    return [(draw.epoch, draw.row, draw.attempt) for draw in draws]


def test_without_drops_a_step_is_what_is_drawn():
    flow = flow_of(graph=[GRAPH[0], GRAPH[5]])
    assert not flow.drops
    assert [draw.row for draw in flow.open(0, 3)] == [0, 1, 2]
    assert flow.may_open(1)
    flow.open(1, 2)
    assert flow.under_way == 5
    assert flow.samples(0, "gen") == flow.samples(0, "train") == ids(0, 1, 2)
    assert flow.samples(1, "train") == ids(3, 4)


def test_dropped_samples_are_replaced_by_the_next_ones():
    flow = flow_of()
    flow.open(0, 3)
    assert not flow.may_open(1)  # which rows it takes is not known yet
    flow.drop(0, "choose", {"e0r1": "equal"})
    assert rows(flow.complete(0)) == [(0, 3, 0)]
    assert flow.samples(0, "gen") == ids(3)
    flow.drop(0, "choose", {"e0r3": "long"})
    assert rows(flow.complete(0)) == [(0, 4, 0)]
    assert flow.complete(0) == []
    assert flow.samples(0, "train") == ids(0, 2, 4)
    assert flow.surplus(0) == ids(1, 3)
    assert flow.may_open(1)
    assert [draw.row for draw in flow.open(1, 3)] == [5, 6, 7]


def test_a_call_works_on_what_the_calls_before_it_have_kept():
    flow = flow_of()
    flow.open(0, 4)
    flow.drop(0, "score", {"e0r0": "unscored"})
    flow.drop(0, "choose", {"e0r2": "equal"})
    assert flow.samples(0, "choose") == ids(1, 2, 3)
    assert flow.samples(0, "late") == ids(1, 3)
    # it waits for neither, so what it gets must not depend on which of them is done first
    assert flow.samples(0, "look") == ids(0, 1, 2, 3)


def test_of_two_reasons_the_one_that_comes_first_in_the_graph_counts():
    for order in (("score", "choose"), ("choose", "score")):
        flow = flow_of()
        flow.open(0, 1)
        for name in order:
            flow.drop(0, name, {"e0r0": {"score": "unscored", "choose": "equal"}[name]})
        flow.complete(0)
        (drop,) = flow.close(0).drops.values()
        assert (drop.call, drop.reason) == ("score", "unscored")


def test_surplus_samples_are_the_first_of_the_next_step():
    flow = flow_of(per_draw=4)
    flow.open(0, 2)
    flow.drop(0, "choose", {"e0r1": "equal"})
    assert flow.complete(0) == []
    assert flow.samples(0, "train") == ids(0, 2)
    assert flow.surplus(0) == ids(1, 3)
    assert rows(flow.queue.returned) == [(0, 3, 1)]
    assert rows(flow.open(1, 2)) == [(0, 3, 1), (0, 4, 0), (0, 5, 0), (0, 6, 0)]


def test_a_queue_continues_where_another_ended():
    flow = flow_of(rows=5, per_draw=4)
    flow.open(0, 1)
    flow.complete(0)
    place, returned = flow.queue.place, flow.queue.returned
    again = flow_of(rows=5, place=place, returned=[Draw(*row) for row in rows(returned)], per_draw=4)
    assert rows(again.open(1, 1)) == rows(flow.open(1, 1)) == [(0, 1, 1), (0, 2, 1), (0, 3, 1), (0, 4, 0)]
    assert rows(again.queue.take(1)) == [(1, 0, 0)]


def test_too_many_redraws_are_an_error_that_says_what_was_dropped():
    flow = flow_of(most_redraws=2)
    flow.open(4, 2)
    flow.drop(4, "score", {"e0r0": "unscored"})
    flow.drop(4, "choose", {"e0r1": "equal"})
    for row in (2, 4):
        assert len(flow.complete(4)) == 2
        flow.drop(4, "choose", {f"e0r{row}": "equal", f"e0r{row + 1}": "long"})
    with pytest.raises(DataError) as caught:
        flow.complete(4)
    assert (caught.value.code, caught.value.exit_code, caught.value.where) == ("F80", 4, "graph.score, graph.choose")
    expected = "dropped: score 1 (unscored), choose 3 (equal), choose 2 (long)"
    assert caught.value.what == f"step 5: the batch is empty: no sample is left of 6 in 3 draws; {expected}"
    assert "train.max_redraws" in caught.value.hint


def test_an_error_says_how_many_are_left():
    flow = flow_of(most_redraws=0)
    flow.open(0, 3)
    flow.drop(0, "choose", {"e0r1": "equal"})
    with pytest.raises(DataError, match="2 of the 3 samples of a batch are left of 3 in 1 draw; dropped: choose 1"):
        flow.complete(0)


def test_where_nothing_is_trained_dropped_samples_are_not_replaced():
    flow = flow_of(graph=GRAPH[:5], replaces=False, per_draw=7)
    assert len(flow.open(0, 3)) == 3
    flow.drop(0, "choose", dict.fromkeys(ids(0, 1, 2), "equal"))
    assert flow.complete(0) == []
    assert flow.close(0).batch == []


def test_a_batch_that_is_complete_loses_no_samples():
    flow = flow_of()
    flow.open(0, 1)
    flow.complete(0)
    with pytest.raises(UsageError, match="score drops samples of a batch that is complete"):
        flow.drop(0, "score", {"e0r0": "unscored"})


def test_the_ledger_and_the_counts_of_a_step():
    flow = flow_of(per_draw=3)
    flow.open(0, 2)
    flow.drop(0, "choose", {"e0r0": "equal", "e0r2": "long"})
    flow.complete(0)
    flow.complete(0)
    step = flow.close(0)
    assert list(step.ledger("trained", {id_: {"gen": 4} for id_ in step.batch})) == [
        {"sample": "e0r0", "state": "dropped", "call": "choose", "reason": "equal"},
        {"sample": "e0r1", "state": "trained", "versions": {"gen": 4}},
        {"sample": "e0r2", "state": "dropped", "call": "choose", "reason": "long"},
        {"sample": "e0r3", "state": "trained", "versions": {"gen": 4}},
    ]
    assert step.counts(["equal", "long", "other"]) == {
        "samples/drawn": 6, "samples/dropped": 2, "samples/redrawn": 3, "samples/returned": 2,
        "samples/dropped/equal": 1, "samples/dropped/long": 1, "samples/dropped/other": 0,
    }  # fmt: skip


@given(
    data_rows=st.integers(1, 30), size=st.integers(1, 8), per_draw=st.none() | st.integers(1, 12),
    bad=st.sets(st.integers(0, 400)), pauses=st.sets(st.integers(0, 11)),
)  # fmt: skip
def test_every_row_is_trained_once_or_dropped_or_still_waits(data_rows, size, per_draw, bad, pauses):
    """Whatever is dropped, and whenever the run is resumed. Batches are the samples that were not dropped, in order."""

    def is_bad(draw):
        return draw.epoch * data_rows + draw.row in bad

    flow, trained, dropped, asked = flow_of(data_rows, per_draw=per_draw, most_redraws=500), [], [], []
    for number in range(12):
        if number in pauses:
            queue = flow.queue
            flow = flow_of(data_rows, place=queue.place, returned=queue.returned, per_draw=per_draw, most_redraws=500)
        draws = flow.open(number, size)
        while draws:
            flow.drop(number, "choose", {draw.id: "equal" for draw in draws if is_bad(draw)})
            draws = flow.complete(number)
        step = flow.close(number)
        assert len(step.batch) == size
        trained += step.batch
        dropped += step.drops
        asked += [draw.id for draw in step.drawn]
    waiting = [draw.id for draw in flow.queue.returned]
    order = DataOrder(data_rows, seed=1, shuffle=False)
    drawn = [Draw(*order.at(place)) for place in range(flow.queue.place)]
    assert sorted([*trained, *dropped, *waiting]) == sorted(draw.id for draw in drawn)
    assert [*trained, *waiting] == [draw.id for draw in drawn if draw.id not in dropped]
    assert set(asked) == {draw.id for draw in drawn}
