import itertools
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch

from rlcli.ops.advantages import (
    BASELINES,
    SCALES,
    BaselineName,
    CreditName,
    ScaleName,
    Trajectories,
    generalized,
    relative,
    standardized,
)
from rlcli.ops.gae import gae
from rlcli.testing.tiny_engine import TinyRanks

SEQLENS = [4, 3, 2, 3, 1]
MASK = torch.tensor([False, True, True, False, True, True, True, True])
"""Responses of 2, 1, 1, 2 and no actions."""


def trajectories(**changes):
    columns = {
        "rewards": torch.tensor([0.0, 0.25, 0.75, 0.0, 3.0, 2.0, -0.5, 1.5]),
        "values": torch.linspace(0, 1, sum(SEQLENS)),
        "mask": MASK,
        "seqlens": SEQLENS,
        "group": torch.tensor([0, 0, 1, 1, 1]),
        "bootstrap": torch.tensor([True, False, False, False, False]),
    }
    return Trajectories(**{**columns, **changes})


def test_every_baseline_and_scale_has_a_function():
    assert set(BASELINES) == set(get_args(BaselineName))
    assert set(SCALES) == set(get_args(ScaleName))


def advantages(inputs=None, **settings):
    return relative(inputs or trajectories(), **settings)[0].tolist()


def test_group_relative_advantages_equal_those_worked_by_hand():
    """Outcomes 1 and 3: mean 2, standard deviation √2. Outcomes 2 and 1, and a sequence without
    actions: mean 1.5, standard deviation 1/√2."""
    estimates, credits = relative(trajectories())
    a, b = 1 / 2**0.5, 0.5 / 0.5**0.5
    assert estimates.tolist() == pytest.approx([0, -a, -a, 0, a, b, -b, -b], abs=1e-5)
    assert credits.tolist() == [0, 1, 1, 0, 3, 2, 1, 1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"baseline": "group"}, [-1, -1, 1, 0.5, -0.5, -0.5]),
        ({"baseline": "leave_one_out"}, [-2, -2, 2, 1, -1, -1]),
        ({"baseline": "batch"}, [-0.75, -0.75, 1.25, 0.25, -0.75, -0.75]),
        ({"baseline": "none"}, [1, 1, 3, 2, 1, 1]),
        ({"baseline": "none", "credit": "to_go"}, [1, 0.75, 3, 2, 1, 1.5]),
        (
            {"baseline": "group", "credit": "to_go"},
            [-0.9375, -1.1875, 1.0625, 0.375, -0.625, -0.125],
        ),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else None,
)
def test_baselines_and_credits_equal_those_worked_by_hand(settings, expected):
    """Outcomes 1, 3; 2, 1, and a sequence without actions; undivided. The batch's mean is 7/4."""
    estimates = advantages(scale="none", **settings)
    assert [estimates[t] for t in (1, 2, 4, 5, 6, 7)] == pytest.approx(expected)
    assert (estimates[0], estimates[3]) == (0, 0), "prompts"


@pytest.mark.parametrize(
    ("turn_discount", "expected"), [(1.0, [3, 3, 2, 2]), (0.5, [2, 2, 2, 2]), (0.0, [1, 1, 2, 2])]
)
def test_rewards_to_go_are_discounted_over_turns(turn_discount, expected):
    """Two turns of two tokens: the first earns 1, the second 2; a token between them is
    observed."""
    episode = Trajectories(
        rewards=torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0]),
        values=torch.zeros(6),
        mask=torch.tensor([True, True, False, True, True]),
        seqlens=[6],
        group=torch.tensor([0]),
        bootstrap=torch.tensor([False]),
    )
    settings = {"baseline": "none", "scale": "none", "credit": "to_go"}
    estimates, _ = relative(episode, turn_discount=turn_discount, **settings)
    assert estimates[episode.mask].tolist() == expected
    assert estimates[2] == 0
    reference, _ = generalized(episode, discount=1.0, gae_lambda=1.0, turn_discount=turn_discount)
    assert reference[episode.mask].tolist() == expected, "without a critic they are the same"


def test_the_batch_scale_equals_that_worked_by_hand():
    """Of the outcomes 1, 3, 2, 1: variance (9 + 25 + 1 + 9) / 16 / 3 = 11/12."""
    estimates = advantages(baseline="group", scale="batch")
    assert estimates[1] == pytest.approx(-1 / (11 / 12) ** 0.5, rel=1e-5)
    assert estimates[5] == pytest.approx(0.5 / (11 / 12) ** 0.5, rel=1e-5)


def test_the_mean_scale_weights_right_responses_by_their_rarity():
    """One of four is right, which counts 3 and the others -1; two of three: 1/2, 1/2 and -1."""
    inputs = outcomes_of([1, 0, 0, 0], [1, 1, 0])
    expected = [3, -1, -1, -1, 0.5, 0.5, -1]
    assert advantages(inputs, scale="mean") == pytest.approx(expected, rel=1e-5)


def test_groups_whose_mean_is_not_above_zero_teach_nothing_at_the_mean_scale():
    assert advantages(outcomes_of([-1, 1, 0], [-2, -1, -1]), scale="mean") == [0.0] * 6


def outcomes_of(*groups):
    """Responses of one token to prompts of one token."""
    rewards = torch.tensor([float(reward) for group in groups for reward in group])
    group = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    count = len(rewards)
    empty = torch.zeros(count, dtype=torch.bool)
    return Trajectories(rewards, torch.zeros(2 * count), ~empty, [2] * count, group, empty)


def test_rewards_are_standardized_in_their_group():
    """Of 1 and 3: mean 2, standard deviation √2; equal ones carry nothing."""
    numbers, group = torch.tensor([1.0, 3.0, 5.0, 5.0, 7.0]), torch.tensor([0, 0, 1, 1, 2])
    a = 1 / 2**0.5
    assert standardized(numbers, group).tolist() == pytest.approx([-a, a, 0, 0, 0], abs=1e-5)


def test_leave_one_out_differs_from_the_group_mean_by_a_factor():
    """R - mean of the others = n / (n - 1) · (R - mean), for a group of three as well."""
    three = {"group": torch.tensor([0, 1, 1, 1, 2])}
    left_out = advantages(trajectories(**three), baseline="leave_one_out", scale="none")
    by_mean = advantages(trajectories(**three), baseline="group", scale="none")
    assert left_out[4:] == pytest.approx([1.5 * a for a in by_mean[4:]])


def test_batch_statistics_cover_all_ranks():
    """Two ranks, of two and of three sequences: their sums are added."""
    t = trajectories()
    expected = relative(t, baseline="batch", scale="batch")[0]
    shares = [
        Trajectories(
            t.rewards[:5], t.values[:7], t.mask[:5], SEQLENS[:2], t.group[:2], t.bootstrap[:2]
        ),
        Trajectories(
            t.rewards[5:], t.values[7:], t.mask[5:], SEQLENS[2:], t.group[2:], t.bootstrap[2:]
        ),
    ]
    ranks = TinyRanks(2)

    def of_rank(rank):
        return relative(
            shares[rank],
            lambda x: ranks.all_reduce(rank, x, "sum"),
            baseline="batch",
            scale="batch",
        )[0]

    torch.testing.assert_close(torch.cat(ranks.run(of_rank)), expected)


def test_equal_outcomes_and_groups_of_one_have_zero_advantages():
    same = trajectories(rewards=torch.tensor([0.0, 0.25, 0.75, 0.0, 1.0, 2.0, 0.5, 1.5]))
    alone = trajectories(group=torch.tensor([0, 1, 2, 3, 4]))
    for baseline in ("group", "leave_one_out"):
        for scale in SCALES:
            assert advantages(same, baseline=baseline, scale=scale) == [0.0] * 8
            assert advantages(alone, baseline=baseline, scale=scale) == [0.0] * 8


def dense(*rewards):
    """Responses of one group to prompts of one token, with a reward for each action."""
    lengths = [len(numbers) + 1 for numbers in rewards]
    flat = torch.tensor([number for numbers in rewards for number in numbers])
    nothing = torch.zeros(len(rewards))
    return Trajectories(
        flat,
        torch.zeros(sum(lengths)),
        torch.ones(len(flat)).bool(),
        lengths,
        nothing.long(),
        nothing.bool(),
    )


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_advantages_are_zero_where_outcomes_do_not_differ(baseline, scale):
    """Also where rewards of actions differ, and where equal outcomes differ only by the rounding of
    float32."""
    for inputs in (
        dense([0.1, 0.7, -0.3]),
        dense([0.1, 0.7], [0.7, 0.1]),
        dense([0.1, 0.2], [0.3, 0.0, 0.0]),
        dense([1.0, 0.1, 0.2, -1.3], [0.0]),
        dense([1000.1, 200.2, -1200.3], [0.0]),
    ):
        assert set(advantages(inputs, baseline=baseline, scale=scale)) == {0.0}


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_advantages_are_zero_where_rewards_to_go_do_not_differ(baseline, scale):
    """Up to the rounding of float32, which is relative to the rewards that are added up."""
    for inputs in (
        dense([0.1, 0.7, -0.3]),
        dense([0.1, 0.7, -0.3], [0.1, 0.7, -0.3]),
        dense([0.1, 0.2, 0.3], [0.1, 0.2, 0.3 + 1e-8]),
        dense([0.0, 1.0], [0.0, 0.0, 1.0]),
        dense([0.7, -0.2, -0.1], [0.0]),  # credits of 0.4, -0.3 and -0.1
    ):
        settings = {"baseline": baseline, "scale": scale, "credit": "to_go"}
        assert set(advantages(inputs, **settings)) == {0.0}


def test_rewards_to_go_are_compared_without_rounding():
    """The mean credit of the second response is that of the three."""
    estimates = advantages(dense([0.1, 0.19], [0.1, 0.2], [0.1, 0.21]), credit="to_go")
    assert abs(estimates[2] + estimates[3]) < 1e-6
    assert estimates[0] + estimates[1] == pytest.approx(-estimates[4] - estimates[5])


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_what_was_earned_before_is_no_advantage_of_later_actions(scale):
    """Credits of 5 to 1 and of 5.1 to 1.1 are centred, and at most about one and a half standard
    deviations from their mean, however alike the sums are."""
    steps = dense([1.0] * 5, [1.0] * 4 + [1.1])
    first, second = torch.tensor(advantages(steps, scale=scale, credit="to_go")).split(5)
    assert float(first.mean() + second.mean()) == pytest.approx(0, abs=1e-6)
    assert float((second - first).min()) > 0
    assert float(torch.cat([first, second]).abs().max()) < (2.1 if scale == "none" else 1.5)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_rewards_to_go_are_divided_by_the_standard_deviation_of_credits(scale):
    """Credits 2, 1 and 4, 3: their turns have the means 3/2 and 7/2, of variance 2, and vary by
    1/4 within; together a standard deviation of 3/2."""
    estimates = advantages(dense([1.0, 1.0], [1.0, 3.0]), scale=scale, credit="to_go")
    assert estimates == pytest.approx([-1 / 3, -1, 1, 1 / 3], rel=1e-5)


def three_episodes_of_two_turns():
    """Each turn earns 1, the last turn of the last two episodes 2; a fourth episode ends after its
    first turn. A token is observed between turns."""
    turns = [[1.0, 0.0, 1.0], [1.0, 0.0, 2.0], [1.0, 0.0, 2.0]]
    return replace(dense(*turns, [1.0]), mask=torch.tensor([True, False, True] * 3 + [True]))


@pytest.mark.parametrize(("baseline", "share"), [("group", 1.0), ("leave_one_out", 1.5)])
@pytest.mark.parametrize(("scale", "spread"), [("group", 3**-0.5), ("none", 1.0)])
@pytest.mark.parametrize("turn_discount", [1.0, 0.5, 0.0])
def test_turns_are_compared_with_the_same_turn_of_others(
    baseline, share, scale, spread, turn_discount
):
    settings = {"baseline": baseline, "scale": scale, "turn_discount": turn_discount}
    estimates = advantages(three_episodes_of_two_turns(), credit="to_go", **settings)
    expected = [-2 / 3 * share / spread, share / 3 / spread, share / 3 / spread]
    assert estimates[2:9:3] == pytest.approx(expected, rel=1e-5)
    first, second, third, fourth = estimates[0:10:3]
    assert fourth <= first <= second == third
    assert first + second + third + fourth == pytest.approx(0, abs=1e-6)


def test_turns_are_not_compared_with_those_of_other_prompts():
    first = three_episodes_of_two_turns()
    second = replace(first, rewards=first.rewards * torch.arange(1.0, 11.0))
    both = Trajectories(
        torch.cat([first.rewards, second.rewards]),
        torch.cat([first.values, second.values]),
        torch.cat([first.mask, second.mask]),
        [*first.seqlens, *second.seqlens],
        torch.cat([first.group, second.group + 1]),
        torch.cat([first.bootstrap, second.bootstrap]),
    )
    expected = [*advantages(first, credit="to_go"), *advantages(second, credit="to_go")]
    assert advantages(both, credit="to_go") == pytest.approx(expected)


def test_advantages_in_a_group_ignore_shift_and_scale_of_rewards():
    """Advantages compare: what all responses to a prompt earn in addition,
    and the units, cancel."""
    inputs = trajectories()
    shifted = inputs.rewards.clone()
    shifted[[2, 4]] += 5.0  # once for each response of group 0
    torch.testing.assert_close(relative(trajectories(rewards=shifted))[0], relative(inputs)[0])
    scaled = trajectories(rewards=inputs.rewards * 100)
    torch.testing.assert_close(relative(scaled)[0], relative(inputs)[0], atol=1e-5, rtol=1e-5)


def test_generalized_equals_gae():
    t = trajectories()
    expected = gae(t.rewards, t.values, t.seqlens, t.bootstrap, 0.9, 0.8)
    for tensor, reference in zip(
        generalized(t, discount=0.9, gae_lambda=0.8), expected, strict=True
    ):
        assert torch.equal(tensor, reference)


@pytest.mark.parametrize(
    "estimate",
    [
        partial(generalized, discount=0.9, gae_lambda=0.8),
        *(
            partial(relative, baseline=baseline, scale=scale, credit=credit)
            for baseline, scale, credit in itertools.product(
                BASELINES, SCALES, get_args(CreditName)
            )
        ),
    ],
    ids=lambda estimate: " ".join(map(str, estimate.keywords.values())),
)
class TestEveryEstimator:
    """What holds for every estimator."""

    def test_returns_one_float32_for_each_action(self, estimate):
        for numbers in estimate(trajectories()):
            assert numbers.shape == MASK.shape
            assert numbers.dtype is torch.float32
            assert numbers.isfinite().all()

    def test_inputs_are_not_modified(self, estimate):
        inputs, original = trajectories(), trajectories()
        estimate(inputs)
        assert torch.equal(inputs.rewards, original.rewards)
        assert torch.equal(inputs.values, original.values)

    def test_groups_do_not_influence_each_other(self, estimate):
        if "batch" in estimate.keywords.values():
            return
        expected, _ = estimate(trajectories())
        t = trajectories()
        first = Trajectories(
            t.rewards[:5], t.values[:7], t.mask[:5], SEQLENS[:2], t.group[:2], t.bootstrap[:2]
        )
        torch.testing.assert_close(estimate(first)[0], expected[:5])

    def test_a_batch_without_sequences_is_allowed(self, estimate):
        none = torch.zeros(0)
        empty = Trajectories(none, none, none.bool(), [], none.long(), none.bool())
        assert [len(numbers) for numbers in estimate(empty)] == [0, 0]
