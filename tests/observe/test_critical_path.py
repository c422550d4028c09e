"""What determined how long a step took."""

from dataclasses import replace

import pytest

from rlcli.api.timing import TimeSpan
from rlcli.observe.critical_path import (
    BETWEEN,
    StepTrace,
    critical_path,
    median_step,
    steps_of,
    waits_of,
)
from rlcli.observe.step_profile import profile_of_step
from rlcli.observe.trace import MASTER, STEP, STEPS, Trace, Traced

KINDS = {"gen": "generate", "train": "train_step", "train.copy_to": "copy"}


def call(name, rank, began, ended):
    return Traced(
        rank, TimeSpan(name, KINDS.get(name, "inference"), began, ended, "calls"), "step 1"
    )


def wait(name, rank, began, ended):
    return Traced(rank, TimeSpan(f"waits for {name}", "wait", began, ended, "calls"), cause=name)


def step(*traced, ended=10.0):
    return StepTrace(1, TimeSpan("step 1", STEP, 0.0, ended, STEPS), traced)


def path(of_step):
    return [
        (stretch.name, stretch.rank, stretch.began, stretch.ended)
        for stretch in critical_path(of_step)
    ]


PPO = step(
    call("gen", 0, 0, 4),
    wait("gen", 1, 0, 4),
    call("ref", 1, 4, 7),
    call("value", 0, 4, 5),
    wait("ref", 0, 5, 7),
    call("train", 0, 7, 9.5),
    wait("train", 1, 7, 9.5),
)


def test_the_path_leads_from_rank_to_rank_and_covers_the_step():
    assert path(PPO) == [
        ("gen", 0, 0, 4),
        ("ref", 1, 4, 7),
        ("train", 0, 7, 9.5),
        (BETWEEN, None, 9.5, 10),
    ]


def test_a_call_of_another_rank_that_nothing_waited_for_is_not_on_the_path():
    """`other` ends just before `train` begins, but `train` waits for `ref`."""
    waiting = step(
        call("ref", 1, 0, 3),
        call("other", 2, 0, 4),
        wait("ref", 0, 0, 3.9),
        call("train", 0, 4.3, 10),
    )
    assert [name for name, *_ in path(waiting)] == ["ref", BETWEEN, "train"]


def test_a_copy_waits_for_the_rank_that_comes_last():
    late = Traced(
        1, TimeSpan("waits for the other ranks of the copy", "wait", 2, 6, "calls"), "step 1"
    )
    copied = step(
        call("train", 0, 0, 6), call("train.copy_to", 1, 2, 9), late, call("gen", 1, 9, 10)
    )
    assert [name for name, *_ in path(copied)] == ["train", "train.copy_to", "gen"]


@pytest.mark.parametrize("after", [0.0, 0.0003, 0.1])
def test_a_copy_that_only_waited_leads_to_what_it_waited_for(after):
    copy = call("train.copy_to", 1, 1, 9 + after)
    late = replace(wait("the other ranks of the copy", 1, 1, 9), of="step 1")
    assert path(step(call("train", 0, 0, 9), copy, late))[0] == ("train", 0, 0, 9)


def test_a_call_that_began_in_the_step_before_counts_from_the_beginning():
    crossing = step(call("gen", 1, -5, 3), wait("gen", 0, 0, 3), call("train", 0, 3, 10))
    assert path(crossing) == [("gen", 1, 0, 3), ("train", 0, 3, 10)]


def test_a_call_in_progress_at_the_end_is_not_on_the_path():
    ahead = step(call("train", 0, 0, 10), call("gen", 1, 2, 14))
    assert path(ahead) == [("train", 0, 0, 10)]


def test_a_step_without_calls_is_between_them():
    assert path(step()) == [(BETWEEN, None, 0, 10)]


@pytest.mark.parametrize("shift", [0.0, 0.0004])
def test_the_path_of_any_step_has_its_length(shift):
    """Spans that touch each other only nearly."""
    traced = [call(f"c{n}", n % 3, n + shift * (n % 2), n + 1.0) for n in range(10)]
    assert sum(stretch.seconds for stretch in critical_path(step(*traced))) == pytest.approx(10)


def test_waits_are_those_of_ranks_with_the_same_calls():
    (first, second) = waits_of(PPO)
    assert (first.ranks, first.calls, first.seconds) == (
        (0,),
        ("gen", "train", "value"),
        {"for ref": 2},
    )
    assert second.seconds == {"for gen": 4, "for train": 2.5}


def test_the_profile_says_what_would_make_the_step_shorter():
    profile = profile_of_step(PPO)
    assert [(row.call, row.seconds) for row in profile.path] == [
        ("gen", 4),
        ("ref", 3),
        ("train", 2.5),
        (BETWEEN, 0.5),
    ]
    assert profile.advice == [
        "gen takes 4.00 s (40%), and rank 1 waits 4.00 s for it. Whatever makes it faster "
        "makes the step shorter.",
        "With ranks of its own (rollout.devices of its role) and train.max_staleness=1, it would "
        "run while train works on the step before.",
    ]


def test_generation_that_runs_ahead_needs_devices():
    gen = Traced(1, TimeSpan("gen", "generate", 0, 6, "calls"), "samples made ahead, chunk 3")
    profile = profile_of_step(step(gen, wait("gen", 0, 0, 6), call("train", 0, 6, 10)))
    assert "it needs more devices, or shorter responses" in profile.advice[1]


def test_uneven_ranks_are_named():
    uneven = step(call("train", 0, 0, 10), call("train", 1, 0, 4), wait("train", 1, 4, 10))
    assert "Its ranks are uneven: 4.00 to 10.0 s, and rank 0 is the slowest." in (
        profile_of_step(uneven).advice
    )


def test_a_step_has_what_overlaps_with_it_even_if_that_ended_later():
    windows = [
        Traced(MASTER, TimeSpan(f"step {n}", STEP, 10.0 * n, 10.0 * n + 10, STEPS)) for n in (0, 1)
    ]
    gen = call("gen", 1, 5, 12)
    steps = steps_of(Trace(0.0, {1: [windows[0]], 2: [windows[1], gen]}))
    assert [gen in each.traced for each in steps] == [True, True]


def test_the_median_step_is_not_the_first():
    steps = [step(ended=length) for length in (100.0, 3.0, 1.0, 2.0)]
    assert median_step(steps).seconds == 2.0
    assert median_step(steps[:1]).seconds == 100.0
