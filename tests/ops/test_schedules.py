"""Learning rates by hand, and what holds for every length of a run."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlcli.ops.schedules import learning_rate

SCHEDULES = ("constant", "linear", "cosine")


def rates(total_steps=5, **settings):
    return [
        learning_rate(step, peak=1.0, total_steps=total_steps, **settings)
        for step in range(total_steps)
    ]


def test_constant_linear_and_cosine_equal_rates_worked_by_hand():
    assert rates() == [1.0] * 5
    assert rates(schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(schedule="linear", floor=0.2) == pytest.approx([1.0, 0.84, 0.68, 0.52, 0.36])
    assert rates(schedule="cosine") == pytest.approx(
        [1.0, 0.904508, 0.654508, 0.345492, 0.095492], abs=1e-6
    )


def test_the_first_step_of_a_warm_up_has_a_positive_rate():
    assert rates(warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_both_steps_of_a_run_of_two_have_a_positive_rate():
    assert rates(2, schedule="linear") == pytest.approx([1.0, 0.5])
    assert rates(2, schedule="cosine") == pytest.approx([1.0, 0.5])


@given(
    st.integers(1, 10**12),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.sampled_from(SCHEDULES),
    st.sampled_from([0.0, 0.1, 1.0]),
)
@example(1, 0, 0, "linear", 0.0)
@example(10**12, 0, 10**12 - 1, "cosine", 0.0)
def test_every_step_of_a_run_has_a_positive_rate(total_steps, warmup_steps, step, schedule, floor):
    step %= total_steps
    rate = learning_rate(
        step,
        peak=1e-5,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        schedule=schedule,
        floor=floor,
    )
    assert 0 < rate <= 1e-5 * (1 + 1e-12)


@given(
    st.integers(1, 200),
    st.integers(0, 250),
    st.sampled_from(SCHEDULES),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_the_rate_rises_during_warm_up_and_never_after_it(
    total_steps, warmup_steps, schedule, floor
):
    schedule_rates = rates(total_steps, warmup_steps=warmup_steps, schedule=schedule, floor=floor)
    peak = min(warmup_steps, total_steps - 1)
    assert schedule_rates[: peak + 1] == sorted(schedule_rates[: peak + 1])
    assert schedule_rates[peak:] == sorted(schedule_rates[peak:], reverse=True)
    assert warmup_steps >= total_steps or schedule_rates[warmup_steps] == 1.0
    assert warmup_steps >= total_steps or min(schedule_rates[warmup_steps:]) >= floor


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_decay_equals_that_of_torch(schedule):
    """torch's schedules over as many steps as the run has, which is how they are commonly used."""
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    if schedule == "linear":
        theirs = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=0.1, total_iters=7
        )
    else:
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7, eta_min=0.1)
    expected = []
    for _ in range(7):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates(7, schedule=schedule, floor=0.1) == pytest.approx(expected)


def test_steps_beyond_the_end_have_the_final_rate():
    assert learning_rate(
        100, peak=1.0, total_steps=5, schedule="cosine", floor=0.1
    ) == pytest.approx(0.1)
    assert learning_rate(100, peak=1.0, total_steps=5, schedule="linear") == 0.0


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="constant, linear or cosine"):
        learning_rate(0, peak=1.0, total_steps=1, schedule="step")
