import inspect
from typing import get_args

import pytest
import torch

from rlcli.ops.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimatorName,
    Trajectories,
    generalized,
    group_relative,
)
from rlcli.ops.gae import gae

SEQLENS = [4, 3, 2, 3, 1]
MASK = torch.tensor([False, True, True, False, True, True, True, True])
"""Responses of 2, 1, 1, 2 and no actions."""


def trajectories(**changes):
    given = {
        "rewards": torch.tensor([0.0, 0.25, 0.75, 0.0, 3.0, 2.0, -0.5, 1.5]),
        "values": torch.linspace(0, 1, sum(SEQLENS)),
        "mask": MASK,
        "seqlens": SEQLENS,
        "group": torch.tensor([0, 0, 1, 1, 1]),
        "bootstrap": torch.tensor([True, False, False, False, False]),
    }
    return Trajectories(**{**given, **changes})


def test_every_name_has_a_function():
    assert set(ADVANTAGE_ESTIMATORS) == set(get_args(AdvantageEstimatorName))


def test_the_group_relative_advantage_by_hand():
    """Outcomes 1 and 3: mean 2, standard deviation √2. Outcomes 2 and 1, and a sequence that did nothing: mean 1.5,
    standard deviation 1/√2."""
    advantages, returns = group_relative(trajectories())
    a, b = 1 / 2**0.5, 0.5 / 0.5**0.5
    assert advantages.tolist() == pytest.approx([0, -a, -a, 0, a, b, -b, -b], abs=1e-5)
    assert returns.tolist() == [0, 1, 1, 0, 3, 2, 1, 1]


def test_equal_outcomes_and_groups_of_one_say_nothing():
    same = trajectories(rewards=torch.tensor([0.0, 0.25, 0.75, 0.0, 1.0, 2.0, 0.5, 1.5]))
    assert group_relative(same)[0].tolist() == [0.0] * 8
    alone = trajectories(group=torch.tensor([0, 1, 2, 3, 4]))
    assert group_relative(alone)[0].tolist() == [0.0] * 8


def test_a_constant_and_a_factor_change_nothing_in_a_group():
    """Advantages compare: what all responses to a prompt earn in addition, and the units, cancel."""
    given = trajectories()
    more = given.rewards.clone()
    more[[2, 4]] += 5.0  # once for each response of group 0
    torch.testing.assert_close(group_relative(trajectories(rewards=more))[0], group_relative(given)[0])
    scaled = trajectories(rewards=given.rewards * 100)
    torch.testing.assert_close(group_relative(scaled)[0], group_relative(given)[0], atol=1e-5, rtol=1e-5)


def test_generalized_is_gae():
    t = trajectories()
    expected = gae(t.rewards, t.values, t.seqlens, t.bootstrap, 0.9, 0.8)
    for one, other in zip(generalized(t, discount=0.9, gae_lambda=0.8), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
class TestEveryEstimator:
    """What holds for all of them: the next one is held to it as soon as it has a name."""

    def estimate(self, name, given):
        settings = {"discount": 0.9, "gae_lambda": 0.8}
        wanted = inspect.signature(ADVANTAGE_ESTIMATORS[name]).parameters
        return ADVANTAGE_ESTIMATORS[name](given, **{key: value for key, value in settings.items() if key in wanted})

    def test_one_float32_for_each_action(self, name):
        for numbers in self.estimate(name, trajectories()):
            assert numbers.shape == MASK.shape
            assert numbers.dtype is torch.float32
            assert numbers.isfinite().all()

    def test_its_input_stays(self, name):
        given, other = trajectories(), trajectories()
        self.estimate(name, given)
        assert torch.equal(given.rewards, other.rewards)
        assert torch.equal(given.values, other.values)

    def test_groups_do_not_see_each_other(self, name):
        whole, _ = self.estimate(name, trajectories())
        t = trajectories()
        first = Trajectories(t.rewards[:5], t.values[:7], t.mask[:5], SEQLENS[:2], t.group[:2], t.bootstrap[:2])
        torch.testing.assert_close(self.estimate(name, first)[0], whole[:5])

    def test_no_sequences(self, name):
        none = torch.zeros(0)
        empty = Trajectories(none, none, none.bool(), [], none.long(), none.bool())
        assert [len(numbers) for numbers in self.estimate(name, empty)] == [0, 0]
