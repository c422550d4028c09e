"""Samples that are made ahead of training: how many, in which order training takes them, and what becomes of each."""

from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.dataflow import MFCDef, ModelInterfaceType, ParamReallocHook, calls_ahead
from rlcli.errors import DataError
from rlcli.runtime.admission import Admission, Limits, Ready
from rlcli.runtime.calls import updates_per_step
from rlcli.runtime.data_order import DataOrder
from rlcli.runtime.sample_flow import Draw, SampleQueue

KINDS = {"generate": ModelInterfaceType.GENERATE, "inference": ModelInterfaceType.INFERENCE,
         "train_step": ModelInterfaceType.TRAIN_STEP}  # fmt: skip


def call(name, role, kind, inputs, outputs=(), **more):
    return MFCDef(
        name=name, model_name=role, interface_type=KINDS[kind], interface_impl=ModelInterfaceAbstraction("x"),
        input_keys=inputs, output_keys=outputs, **more,
    )  # fmt: skip


GRAPH = [
    call("gen", "rollout", "generate", ("prompts",), ("ids",)),
    call("score", "reward", "inference", ("ids",), ("rewards",), drops=("equal",)),
    call("ref", "ref", "inference", ("ids",), ("ref_logprobs",)),
    call("proximal", "actor", "inference", ("ids",), ("proximal_logprobs",)),
    call("margins", "reward", "inference", ("proximal_logprobs",), ("margins",)),
    call("train", "actor", "train_step", ("ids", "rewards"), post_hooks=(ParamReallocHook(target="rollout"),)),
]
AHEAD = calls_ahead(GRAPH)


def admission_of(max_staleness=1, batch=4, chunk=4, rows=1000, max_redraws=10, takes_freshest=False, **more):
    queue = SampleQueue(DataOrder(rows, seed=1, shuffle=False))
    return Admission(queue, AHEAD, Limits(max_staleness, batch, chunk, max_redraws, takes_freshest), **more), queue


def rows(draws):
    return [(draw.row, draw.attempt) for draw in draws]


def make(admission, chunk, version=0, dropped=()):
    """All calls on a chunk; `dropped`: its rows that are dropped."""
    admission.loaded(chunk)
    while tasks := [task for task in admission.startable() if task.step == chunk]:
        ids = admission.start(tasks[0])
        reasons = {id_: "equal" for id_ in ids if int(id_.partition("r")[2]) in dropped}
        is_score, is_gen = tasks[0].call == "score", tasks[0].call == "gen"
        admission.finish(tasks[0], reasons if is_score else {}, version if is_gen else None)


def test_ahead_of_training_runs_what_needs_no_weights_of_the_step():
    assert [mfc.name for mfc in AHEAD] == ["gen", "score", "ref"]
    assert calls_ahead(GRAPH[:3]) == []  # nothing is trained
    assert calls_ahead(GRAPH[1:]) == []  # nothing is generated
    followed = call("look", "actor", "inference", ("prompts",), ("x",), post_hooks=(ParamReallocHook(target="ref"),))
    assert [mfc.name for mfc in calls_ahead([*GRAPH, followed])] == ["gen", "score"]


def test_versions_are_counted_in_training_steps():
    twice = [*GRAPH, call("train_again", "actor", "train_step", ("ids",))]
    assert updates_per_step(GRAPH) == {"actor": 1, "rollout": 1}
    assert updates_per_step(twice) == {"actor": 2, "rollout": 2}


def test_no_more_are_admitted_than_later_steps_may_take():
    admission, _ = admission_of()
    assert rows(admission.admit(8)[1]) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert rows(admission.admit(8)[1]) == [(4, 0), (5, 0), (6, 0), (7, 0)]
    assert admission.admit(8) is None
    assert (admission.running, admission.accepted, admission.ready) == (8, 8, ())


def test_dropped_samples_make_room_for_others():
    admission, _ = admission_of()
    first, _ = admission.admit(8)
    admission.admit(8)
    make(admission, first, dropped={1, 2, 3})
    assert [one.draw.row for one in admission.ready] == [0]
    assert admission.accepted == 5
    assert admission.admit(8) is None  # a chunk of three, while others are in the making
    make(admission, 1)
    assert admission.admit(8) is None  # training can begin without it
    assert [draw.row for draw in admission.take(4)] == [0, 4, 5, 6]
    assert rows(admission.admit(12)[1]) == [(8, 0), (9, 0), (10, 0), (11, 0)]
    assert [line["sample"] for line in admission.drain_drops()] == ["e0r1", "e0r2", "e0r3"]
    assert admission.drain_drops() == []


def test_a_chunk_that_is_not_full_is_drawn_if_training_waits_for_it():
    admission, _ = admission_of(max_staleness=0)
    number, _ = admission.admit(4)
    make(admission, number, dropped={0})
    assert rows(admission.admit(4)[1]) == [(4, 0)]


def test_a_call_works_on_one_chunk_at_a_time_and_the_oldest_first():
    admission, _ = admission_of(max_staleness=2)
    chunks = [admission.admit(12)[0] for _ in range(3)]
    assert admission.startable() == []
    for number in chunks[1:]:
        admission.loaded(number)
    (gen,) = admission.startable()
    assert (gen.step, gen.call) == (1, "gen")
    admission.start(gen)
    assert admission.startable() == []
    admission.loaded(0)
    admission.finish(gen, {}, version=0)
    assert [(task.step, task.call) for task in admission.startable()] == [(0, "gen"), (1, "score"), (1, "ref")]
    assert admission.depths() == {"gen": 8, "score": 4, "ref": 4}


def test_training_takes_what_the_oldest_weights_have_made():
    admission, _ = admission_of(max_staleness=4)
    for chunk, version in ((0, 3), (1, 2), (2, 3)):
        admission.admit(12)
        make(admission, chunk, version)
    assert [draw.row for draw in admission.take(6)] == [4, 5, 6, 7, 0, 1]
    assert admission.ages(["e0r4", "e0r0"], step=4) == {"e0r4": 2, "e0r0": 1}
    assert [one.oldest for one in admission.let_go(["e0r4", "e0r0"])] == [2, 3]


def test_training_takes_the_samples_of_the_newest_weights_first_if_asked_to():
    admission, _ = admission_of(max_staleness=4, takes_freshest=True)
    for chunk, version in ((0, 3), (1, 2), (2, 3)):
        admission.admit(12)
        make(admission, chunk, version)
    assert [draw.row for draw in admission.take(10)] == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5]


def test_what_is_too_stale_is_given_back_as_a_new_attempt():
    admission, queue = admission_of()
    number, _ = admission.admit(8)
    make(admission, number, version=3)
    assert admission.expire(4) == []
    assert admission.expire(5) == ["e0r0", "e0r1", "e0r2", "e0r3"]
    assert (admission.expired, admission.accepted) == (4, 0)
    assert rows(queue.returned) == rows(admission.admit(8)[1]) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_samples_of_weights_that_never_change_are_not_stale():
    admission, _ = admission_of(ready=[Ready(Draw(0, 7), {})])
    assert admission.expire(1000) == []
    assert admission.ready[0].staleness(1000) == 0


def test_where_too_many_are_dropped_the_run_ends():
    admission, _ = admission_of(max_redraws=1)
    for chunk in range(2):
        admission.admit(8)
        make(admission, chunk, dropped=range(100))
    admission.admit(8)
    with pytest.raises(DataError, match=r"0 of the 4 of a batch are there, and 12 samples .* score 12 \(equal\)"):
        make(admission, 2, dropped=range(100))


@settings(deadline=None, max_examples=60)
@given(
    max_staleness=st.integers(0, 4), batch=st.integers(1, 6), chunk=st.integers(1, 9), bad=st.integers(2, 9),
    choices=st.lists(st.integers(0, 10**6), min_size=50, max_size=300),
)  # fmt: skip
def test_every_sample_is_in_one_place_and_none_is_too_stale(max_staleness, batch, chunk, bad, choices):
    """Whatever finishes first, whatever is dropped, and wherever the run is interrupted: there it continues with other
    limits."""
    admission, queue = admission_of(max_staleness, batch, chunk, max_redraws=10**6)
    step, under_way, trained, dropped = 0, [], [], []
    for choice in choices:
        while (drawn := admission.admit((max_staleness + step + 1) * batch)) is not None:
            admission.loaded(drawn[0])
        assert admission.accepted <= (max_staleness + step + 1) * batch
        for task in admission.startable():
            under_way.append((task, admission.start(task), step))
        if choice % 7 == 0:  # killed; samples in the making wait again, finished ones are kept
            waiting, ready = admission.waiting(), admission.ready
            dropped += [line["sample"] for line in admission.drain_drops()]
            queue = SampleQueue(DataOrder(1000, seed=1, shuffle=False), queue.place, waiting)
            limits = Limits(max_staleness, batch, chunk, 10**6)
            admission, under_way = Admission(queue, AHEAD, limits, step * batch, ready), []
        elif choice % 3 == 0 and not admission.expire(step) and len(admission.ready) >= batch:
            taken = admission.let_go([draw.id for draw in admission.take(batch)])
            assert all(0 <= one.staleness(step) <= max_staleness for one in taken)
            trained += [one.draw.id for one in taken]
            step += 1
        elif under_way:
            task, ids, version = under_way.pop(choice % len(under_way))
            reasons = (
                {id_: "equal" for id_ in ids if crc32(f"{id_} {version}".encode()) % bad == 0}
                if task.call == "score"
                else {}
            )
            admission.finish(task, reasons, version if task.call == "gen" else None)
    dropped += [line["sample"] for line in admission.drain_drops()]
    kept = [one.draw.id for one in admission.ready] + [draw.id for draw in admission.waiting()]
    order = DataOrder(1000, seed=1, shuffle=False)
    assert sorted([*trained, *dropped, *kept]) == sorted(Draw(*order.at(place)).id for place in range(queue.place))
