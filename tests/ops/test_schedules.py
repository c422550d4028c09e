"""Learning rates by hand."""

import pytest

from rlcli.ops.schedules import learning_rate


def rates(**settings):
    return [learning_rate(step, peak=1.0, total_steps=5, **settings) for step in range(5)]


def test_constant_linear_and_cosine_by_hand():
    assert rates() == [1.0] * 5
    assert rates(schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(schedule="linear", floor=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_warm_up_learns_from_the_first_step_on():
    assert rates(warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_the_end_is_not_overrun():
    assert learning_rate(100, peak=1.0, total_steps=5, schedule="cosine") == pytest.approx(0.0)


def test_unknown_schedule():
    with pytest.raises(ValueError, match="constant, linear or cosine"):
        learning_rate(0, peak=1.0, total_steps=1, schedule="step")
