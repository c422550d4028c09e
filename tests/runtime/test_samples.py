"""What becomes of every sample: which of them a step trains on, in which order,
and where the others go."""

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.dataflow import (
    MFCDef,
    ModelInterfaceType,
    ParamReallocHook,
    calls_ahead,
    updates_per_step,
)
from rlcli.errors import DataError, UsageError
from rlcli.runtime.chunks import Ready, StepSamples
from rlcli.runtime.data_order import DataOrder
from rlcli.runtime.draws import Draw, SampleQueue
from rlcli.runtime.samples import Admission, Samples

KINDS = {
    "generate": ModelInterfaceType.GENERATE,
    "inference": ModelInterfaceType.INFERENCE,
    "train_step": ModelInterfaceType.TRAIN_STEP,
}


def call(name, inputs, outputs=(), drops=(), role="role", kind="inference", **fields):
    return MFCDef(
        name=name,
        model_name=role,
        interface_type=KINDS[kind],
        interface_impl=ModelInterfaceAbstraction("x"),
        input_keys=inputs,
        output_keys=outputs,
        drops=drops,
        **fields,
    )


CHOOSING = [
    call("gen", ("prompts",), ("ids",)),
    call("score", ("ids",), ("rewards",), drops=("unscored",)),
    call("look", ("ids",), ("values",)),
    call("choose", ("rewards",), ("chosen",), drops=("equal", "long")),
    call("late", ("chosen",), ("advice",)),
]


def samples_of(rows=100, calls=CHOOSING, position=0, returned=(), accepted=0, **rule):
    queue = SampleQueue(DataOrder(rows, seed=1, shuffle=False), position, returned)
    return Samples(queue, calls, Admission(**{"batch": 4, "max_redraws": 10, **rule}), accepted)


def ids(*rows):
    return [f"e0r{row}" for row in rows]


def rows(draws):
    return [(draw.epoch, draw.row, draw.attempt) for draw in draws]


# -- staleness 0: a step draws its own -------------------------------------------------------------


def test_without_calls_before_training_a_step_takes_all_that_is_drawn():
    samples = samples_of(calls=[])
    chunk = samples.admit(3)
    assert rows(chunk.draws) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert samples.admit(3) is None
    samples.end(chunk, {})
    step = samples.take(3)
    assert step.ids("train") == step.all_ids == ids(0, 1, 2)
    assert rows(samples.admit(5).draws) == [(0, 3, 0), (0, 4, 0)]


def test_dropped_samples_are_replaced_by_the_next_ones():
    samples = samples_of()
    chunk = samples.admit(3)
    chunk.drop("choose", {"e0r1": "equal"})
    assert samples.end(chunk, {}) == ids(1)
    chunk = samples.admit(3)
    assert chunk.ids("gen") == ids(3)
    chunk.drop("choose", {"e0r3": "long"})
    samples.end(chunk, {})
    chunk = samples.admit(3)
    assert rows(chunk.draws) == [(0, 4, 0)]
    samples.end(chunk, {})
    assert samples.admit(3) is None
    step = samples.take(3)
    assert (step.all_ids, step.surplus) == (ids(0, 2, 4), [])
    assert rows(samples.admit(6).draws) == [(0, 5, 0), (0, 6, 0), (0, 7, 0)]


def test_a_call_works_on_what_the_calls_before_it_have_kept():
    chunk = samples_of().admit(4)
    chunk.drop("score", {"e0r0": "unscored"})
    chunk.drop("choose", {"e0r2": "equal"})
    assert chunk.ids("choose") == ids(1, 2, 3)
    assert chunk.ids("late") == ids(1, 3)
    # it waits for neither, so what it gets must not depend on which of them is done first
    assert chunk.ids("look") == ids(0, 1, 2, 3)


@pytest.mark.parametrize("order", [("score", "choose"), ("choose", "score")])
def test_of_two_reasons_the_one_that_comes_first_in_the_graph_counts(order):
    chunk = samples_of().admit(1)
    for name in order:
        chunk.drop(name, {"e0r0": {"score": "unscored", "choose": "equal"}[name]})
    (drop,) = chunk.drops.values()
    assert (drop.call, drop.reason) == ("score", "unscored")


def test_surplus_samples_are_the_first_of_the_next_step():
    samples = samples_of(chunk=4)
    chunk = samples.admit(2)
    chunk.drop("choose", {"e0r1": "equal"})
    samples.end(chunk, {})
    step = samples.take(2)
    assert (step.all_ids, step.surplus) == (ids(0, 2), ids(3))
    assert rows(samples.queue.returned) == [(0, 3, 0)]
    assert rows(samples.admit(4).draws) == [(0, 3, 0), (0, 4, 0), (0, 5, 0), (0, 6, 0)]


def test_a_sample_dropped_beyond_the_end_of_the_batch_is_tried_again_in_the_next_step():
    """A step that draws one sample at a time would not have drawn it."""
    samples = samples_of(chunk=4)
    chunk = samples.admit(1)
    chunk.drop("choose", {"e0r0": "equal", "e0r2": "long"})
    samples.end(chunk, {})
    step = samples.take(1)
    assert (step.all_ids, step.surplus) == (ids(1), ids(3))
    assert list(step.drops) == ids(0)
    assert step.counts(["equal", "long"])["samples/dropped"] == 1
    assert rows(samples.admit(2).draws) == [(0, 2, 0), (0, 3, 0), (0, 4, 0), (0, 5, 0)]
    assert not samples.drain_drops()


@pytest.mark.parametrize("chunk", [None, 2, 3, 5, 16])
def test_steps_and_drops_do_not_depend_on_how_many_samples_are_drawn_at_a_time(chunk):
    """Whether a sample is dropped depends on the weights of the step that generates it."""

    def steps(**rule):
        samples = samples_of(batch=5, max_redraws=100, **rule)
        for step in range(6):
            while not samples.has(5):
                chunk = samples.admit(5 * step + 5)
                dropped = [d.id for d in chunk.draws if crc32(f"{step} {d.id}".encode()) % 3 == 0]
                chunk.drop("choose", dict.fromkeys(dropped, "equal"))
                samples.end(chunk, {})
            taken = samples.take(5)
            yield rows(sample.draw for sample in taken.batch), taken.drops

    assert list(steps(chunk=chunk)) == list(steps(chunk=1))


def test_a_queue_continues_where_another_ended():
    samples = samples_of(rows=5, chunk=4)
    samples.end(samples.admit(1), {})
    samples.take(1)
    position, returned = samples.queue.position, samples.queue.returned
    resumed = samples_of(
        rows=5,
        position=position,
        returned=[Draw(*row) for row in rows(returned)],
        chunk=4,
        accepted=1,
    )
    expected = [(0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 4, 0)]
    assert rows(resumed.admit(2).draws) == rows(samples.admit(2).draws) == expected
    assert rows(resumed.queue.take(1)) == [(1, 0, 0)]


def test_too_many_redraws_are_an_error_that_says_what_was_dropped():
    queue = SampleQueue(DataOrder(100, seed=1, shuffle=False))
    samples = Samples(queue, CHOOSING, Admission(2, max_redraws=2), 8, step=4)
    chunk = samples.admit(10)
    chunk.drop("score", {"e0r0": "unscored"})
    chunk.drop("choose", {"e0r1": "equal"})
    samples.end(chunk, {})
    for row in (2, 4):
        chunk = samples.admit(10)
        chunk.drop("choose", {f"e0r{row}": "equal", f"e0r{row + 1}": "long"})
        samples.end(chunk, {})
    with pytest.raises(DataError) as caught:
        samples.admit(10)
    assert (caught.value.code, caught.value.exit_code, caught.value.where) == (
        "F80",
        4,
        "graph.score, graph.choose",
    )
    expected = "dropped: score 1 (unscored), choose 3 (equal), choose 2 (long)"
    assert (
        caught.value.what
        == f"step 5: a batch needs 2 samples, but none of 6 drawn is left after 3 draws; {expected}"
    )
    assert "train.max_redraws" in caught.value.hint
    assert samples.abandon() == []
    assert rows(queue.returned) == [(0, row, 0) for row in range(6)]


def test_an_error_says_how_many_are_left():
    samples = samples_of(max_redraws=0)
    chunk = samples.admit(3)
    chunk.drop("choose", {"e0r1": "equal"})
    samples.end(chunk, {})
    with pytest.raises(
        DataError,
        match="a batch needs 3 samples, but only 2 of 3 drawn are left after 1 draw; dropped",
    ):
        samples.admit(3)
    assert samples.abandon() == ids(0, 2)
    assert rows(samples.queue.returned) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]


def test_where_nothing_is_trained_dropped_samples_are_not_replaced():
    samples = samples_of(replaces=False)
    chunk = samples.admit(3)
    chunk.drop("choose", dict.fromkeys(ids(0, 1), "equal"))
    samples.end(chunk, {})
    assert samples.admit(3) is None
    assert samples.take(3).all_ids == ids(2)
    assert rows(samples.admit(6).draws) == [(0, 3, 0), (0, 4, 0), (0, 5, 0)]


def test_a_batch_that_is_complete_loses_no_samples():
    step = StepSamples([Ready(Draw(0, 0), {})])
    step.drop("score", {})
    with pytest.raises(UsageError, match="score drops samples of a batch that is complete"):
        step.drop("score", {"e0r0": "unscored"})


def test_the_ledger_and_the_counts_of_a_step():
    samples = samples_of(chunk=3)
    chunk = samples.admit(2)
    chunk.drop("choose", {"e0r0": "equal", "e0r2": "long"})
    samples.end(chunk, {"gen": 4})
    samples.end(samples.admit(2), {"gen": 4})
    step = samples.take(2)
    assert list(step.ledger("trained", {"gen_more": 5})) == [
        {"sample": "e0r0", "state": "dropped", "call": "choose", "reason": "equal"},
        {"sample": "e0r1", "state": "trained", "versions": {"gen": 4, "gen_more": 5}},
        {"sample": "e0r2", "state": "dropped", "call": "choose", "reason": "long"},
        {"sample": "e0r3", "state": "trained", "versions": {"gen": 4, "gen_more": 5}},
    ]
    assert step.counts(["equal", "long", "other"]) == {
        "samples/drawn": 6,
        "samples/dropped": 2,
        "samples/redrawn": 3,
        "samples/returned": 2,
        "samples/dropped/equal": 1,
        "samples/dropped/long": 1,
        "samples/dropped/other": 0,
    }


@given(
    data_rows=st.integers(1, 30),
    size=st.integers(1, 8),
    chunk=st.none() | st.integers(1, 12),
    bad=st.sets(st.integers(0, 400)),
    pauses=st.sets(st.integers(0, 11)),
)
def test_every_row_is_trained_once_or_dropped_or_still_waits(data_rows, size, chunk, bad, pauses):
    """Whatever is dropped, and whenever the run is resumed. Batches are the samples that were not
    dropped, in order."""

    def is_bad(draw):
        return draw.epoch * data_rows + draw.row in bad

    rule = {"batch": size, "chunk": chunk, "max_redraws": 500}
    samples, trained, dropped, drawn = samples_of(data_rows, **rule), [], [], []
    for number in range(12):
        if number in pauses:
            queue = samples.queue
            samples = samples_of(
                data_rows,
                position=queue.position,
                returned=queue.returned,
                accepted=number * size,
                **rule,
            )
        while (drawn_now := samples.admit((number + 1) * size)) is not None:
            drawn_now.drop("choose", {draw.id: "equal" for draw in drawn_now.draws if is_bad(draw)})
            samples.end(drawn_now, {})
        step = samples.take(size)
        assert len(step.batch) == size
        trained += step.all_ids
        dropped += step.drops
        drawn += [draw.id for draw in step.drawn]
    waiting = [draw.id for draw in samples.waiting()]
    order = DataOrder(data_rows, seed=1, shuffle=False)
    in_order = [Draw(*order.at(row)).id for row in range(samples.queue.position)]
    assert sorted([*trained, *dropped, *waiting]) == sorted(in_order)
    assert [*trained, *waiting] == [id_ for id_ in in_order if id_ not in dropped]
    assert set(drawn) == set(in_order)


# -- above staleness 0: samples are made ahead of all steps ----------------------------------------

GRAPH = [
    call("gen", ("prompts",), ("ids",), role="rollout", kind="generate"),
    call("score", ("ids",), ("rewards",), role="reward", drops=("equal",)),
    call("ref", ("ids",), ("ref_logprobs",), role="ref"),
    call("proximal", ("ids",), ("proximal_logprobs",), role="actor"),
    call("margins", ("proximal_logprobs",), ("margins",), role="reward"),
    call("train", ("ids", "rewards"), role="actor", kind="train_step",
         post_hooks=(ParamReallocHook(target="rollout"),)),
]  # fmt: skip
AHEAD = calls_ahead(GRAPH)


def ahead(
    max_staleness=1, batch=4, chunk=4, rows=1000, max_redraws=10, takes_freshest=False, **fields
):
    queue = SampleQueue(DataOrder(rows, seed=1, shuffle=False))
    return Samples(
        queue, AHEAD, Admission(batch, max_staleness, chunk, max_redraws, takes_freshest), **fields
    )


def end(samples, chunk, version=0, dropped=()):
    """A chunk has been through all calls; `dropped`: its rows that are dropped."""
    chunk.drop("score", {draw.id: "equal" for draw in chunk.draws if draw.row in dropped})
    samples.end(chunk, {"gen": version})


def tries(draws):
    return [(draw.row, draw.attempt) for draw in draws]


def test_calls_that_need_no_weights_of_the_step_run_ahead_of_training():
    assert [mfc.name for mfc in AHEAD] == ["gen", "score", "ref"]
    assert calls_ahead(GRAPH[:3]) == []  # nothing is trained
    assert calls_ahead(GRAPH[1:]) == []  # nothing is generated
    followed = call(
        "look", ("prompts",), ("x",), role="actor", post_hooks=(ParamReallocHook(target="ref"),)
    )
    assert [mfc.name for mfc in calls_ahead([*GRAPH, followed])] == ["gen", "score"]


def test_versions_are_counted_in_training_steps():
    twice = [*GRAPH, call("train_again", ("ids",), role="actor", kind="train_step")]
    assert updates_per_step(GRAPH) == {"actor": 1, "rollout": 1}
    assert updates_per_step(twice) == {"actor": 2, "rollout": 2}


def test_no_more_are_admitted_than_later_steps_may_take():
    samples = ahead()
    assert tries(samples.admit(8).draws) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert tries(samples.admit(8).draws) == [(4, 0), (5, 0), (6, 0), (7, 0)]
    assert samples.admit(8) is None
    assert (samples.running, samples.accepted, samples.ready) == (8, 8, ())


def test_dropped_samples_make_room_for_others():
    samples = ahead()
    first, second = samples.admit(8), samples.admit(8)
    end(samples, first, dropped={1, 2, 3})
    assert [sample.draw.row for sample in samples.ready] == [0]
    assert samples.accepted == 5
    assert samples.admit(8) is None  # a chunk of three, while others are in progress
    end(samples, second)
    assert samples.admit(8) is None  # training can begin without it
    step = samples.take(4)
    assert [sample.draw.row for sample in step.batch] == [0, 4, 5, 6]
    assert tries(samples.admit(12).draws) == [(8, 0), (9, 0), (10, 0), (11, 0)]
    assert list(step.drops) == ids(1, 2, 3)
    assert samples.drain_drops() == []


def test_drops_are_reported_once():
    samples = ahead()
    end(samples, samples.admit(8), dropped={1})
    assert [line["sample"] for line in samples.drain_drops()] == ids(1)
    end(samples, samples.admit(8), dropped={5})
    assert list(samples.take(4).drops) == ids(5)
    assert samples.drain_drops() == []


def test_a_chunk_that_is_not_full_is_drawn_if_training_waits_for_it():
    samples = ahead()
    end(samples, samples.admit(4), dropped={0})
    assert tries(samples.admit(4).draws) == [(4, 0)]


def test_training_takes_the_samples_of_the_oldest_weights_first():
    samples = ahead(max_staleness=4)
    for version in (3, 2, 3):
        end(samples, samples.admit(12), version)
    batch = samples.take(6).batch
    assert [sample.draw.row for sample in batch] == [4, 5, 6, 7, 0, 1]
    assert [sample.oldest for sample in batch] == [2, 2, 2, 2, 3, 3]
    assert [sample.staleness(4) for sample in batch] == [2, 2, 2, 2, 1, 1]


def test_training_takes_the_samples_of_the_newest_weights_first_if_asked_to():
    samples = ahead(max_staleness=4, takes_freshest=True)
    for version in (3, 2, 3):
        end(samples, samples.admit(12), version)
    assert [sample.draw.row for sample in samples.take(10).batch] == [
        0,
        1,
        2,
        3,
        8,
        9,
        10,
        11,
        4,
        5,
    ]


def test_a_sample_that_is_too_stale_is_given_back_as_a_new_attempt():
    samples = ahead()
    end(samples, samples.admit(8), version=3)
    assert samples.expire(4) == []
    assert samples.expire(5) == ids(0, 1, 2, 3)
    assert (samples.expired, samples.accepted) == (4, 0)
    assert (
        tries(samples.queue.returned)
        == tries(samples.admit(8).draws)
        == [(0, 1), (1, 1), (2, 1), (3, 1)]
    )


def test_samples_of_weights_that_never_change_are_not_stale():
    samples = ahead(ready=[Ready(Draw(0, 7), {})])
    assert samples.expire(1000) == []
    assert samples.ready[0].staleness(1000) == 0


def test_too_many_dropped_samples_end_the_run():
    samples = ahead(max_redraws=1)
    for _ in range(2):
        end(samples, samples.admit(8), dropped=range(100))
    chunk = samples.admit(8)
    with pytest.raises(
        DataError, match=r"a batch has 0 of its 4 samples, and 12 samples .* score 12 \(equal\)"
    ):
        end(samples, chunk, dropped=range(100))


@given(
    max_staleness=st.integers(1, 4),
    batch=st.integers(1, 6),
    chunk=st.integers(1, 9),
    bad=st.integers(2, 9),
    choices=st.lists(st.integers(0, 10**6), min_size=50, max_size=300),
)
def test_every_sample_has_one_state_and_none_is_too_stale(
    max_staleness, batch, chunk, bad, choices
):
    """Whatever finishes first, whatever is dropped, and wherever the run is interrupted:
    there it continues."""
    samples = ahead(max_staleness, batch, chunk, max_redraws=10**6)
    step, in_progress, trained, dropped = 0, [], [], []
    for choice in choices:
        limit = (max_staleness + step + 1) * batch
        while (drawn := samples.admit(limit)) is not None:
            in_progress.append((drawn, step))
        assert samples.accepted <= limit
        if choice % 7 == 0:  # killed; samples in progress wait again, finished ones are kept
            dropped += [line["sample"] for line in samples.drain_drops()]
            queue = SampleQueue(
                DataOrder(1000, seed=1, shuffle=False), samples.queue.position, samples.waiting()
            )
            rule, in_progress = Admission(batch, max_staleness, chunk, 10**6), []
            samples = Samples(queue, AHEAD, rule, step * batch, samples.ready)
        elif choice % 3 == 0 and not samples.expire(step) and samples.has(batch):
            taken = samples.take(batch)
            assert all(0 <= sample.staleness(step) <= max_staleness for sample in taken.batch)
            trained += taken.all_ids
            dropped += taken.drops
            step += 1
        elif in_progress:
            ended, version = in_progress.pop(choice % len(in_progress))
            end(
                samples,
                ended,
                version,
                {d.row for d in ended.draws if crc32(f"{d.row} {version}".encode()) % bad == 0},
            )
    dropped += [line["sample"] for line in samples.drain_drops()]
    waiting = [sample.id for sample in samples.ready] + [draw.id for draw in samples.waiting()]
    order = DataOrder(1000, seed=1, shuffle=False)
    in_order = [Draw(*order.at(row)).id for row in range(samples.queue.position)]
    assert sorted([*trained, *dropped, *waiting]) == sorted(in_order)


def test_a_step_waits_for_samples_that_would_be_too_stale_for_the_next():
    samples = ahead(max_staleness=2)
    first, second = samples.admit(12, version=0), samples.admit(12, version=1)
    assert [samples.waits_for(step) for step in (0, 1, 2, 3)] == [False, False, True, True]
    end(samples, first, version=0)
    assert [samples.waits_for(step) for step in (2, 3)] == [False, True]
    end(samples, second, version=1)
    assert not samples.waits_for(3)


def test_a_step_waits_if_later_ones_cannot_take_all_that_become_too_stale():
    samples = ahead(max_staleness=1)
    old, also_old, new = (samples.admit(12, version) for version in (0, 0, 1))
    end(samples, new, version=1)
    assert samples.waits_for(0)  # steps 0 and 1 must take the old ones
    end(samples, old, version=0)
    assert not samples.waits_for(0)
    samples.take(4)
    assert samples.waits_for(1)
    end(samples, also_old, version=0)
    assert not samples.waits_for(1)


def test_where_the_freshest_samples_come_first_no_step_waits_for_old_ones():
    samples = ahead(max_staleness=2, takes_freshest=True)
    samples.admit(12, version=0)
    assert not samples.waits_for(9)


def test_the_oldest_segment_of_any_response_counts():
    samples = ahead()
    chunk = samples.admit(8)
    segments = {id_: [[(3, 10)], [(2, 4), (3, 1)]] for id_ in ids(0, 1, 2, 3)}
    samples.end(chunk, {"gen": 3}, {"gen": segments})
    assert [sample.versions for sample in samples.ready] == [{"gen": 2}] * 4
    assert [Ready.from_json(sample.as_json()).segments for sample in samples.ready] == [
        [[(3, 10)], [(2, 4), (3, 1)]]
    ] * 4
    step = samples.take(4)
    assert [line["segments"] for line in step.ledger("trained", {})] == list(segments.values())


@given(
    max_staleness=st.integers(1, 4),
    batch=st.integers(1, 6),
    chunk=st.integers(1, 9),
    choices=st.lists(st.integers(0, 10**6), min_size=50, max_size=300),
)
def test_no_sample_is_sampled_again_if_steps_wait(max_staleness, batch, chunk, choices):
    """In whatever order responses finish, however long one takes; and a step can always begin once
    what it waits for has finished."""
    samples = ahead(max_staleness, batch, chunk)
    step, in_progress = 0, []
    for choice in choices:
        while (drawn := samples.admit((max_staleness + step + 1) * batch, step)) is not None:
            in_progress.append(drawn)
        if samples.has(batch) and not samples.waits_for(step):
            assert samples.expire(step) == []
            samples.take(batch)
            step += 1
        else:
            assert in_progress
            ended = in_progress.pop(choice % len(in_progress))
            end(samples, ended, ended.version)
