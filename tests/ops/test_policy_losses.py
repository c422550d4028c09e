import inspect
import math
from typing import get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rlcli.ops.policy_losses import (
    LOSS_AGGREGATIONS,
    POLICY_LOSSES,
    RATIO_LEVELS,
    Actions,
    BehaviourWeightLevel,
    LossAggregationName,
    PolicyLossName,
    behaviour_weights,
    clipped,
    clipped_weights,
    constant_mean,
    mean_clipped,
    product_clipped,
    sequence_mean,
    soft_gated,
    token_mean,
    within_binary_kl,
    within_total_variation,
)


def actions(new, old, advantages, mask=None, seqlens=None):
    """Of one sequence, unless `seqlens` says otherwise."""
    columns = [torch.as_tensor(column, dtype=torch.float64) for column in (new, old, advantages)]
    mask = torch.ones(len(new), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    return Actions(*columns, mask, seqlens or [len(new) + 1])


def test_every_loss_aggregation_and_level_has_a_function():
    assert set(POLICY_LOSSES) == set(get_args(PolicyLossName))
    assert set(RATIO_LEVELS) == set(get_args(BehaviourWeightLevel))
    assert set(LOSS_AGGREGATIONS) == set(get_args(LossAggregationName))


def one_token(advantage, ratio, **settings):
    loss, _ = clipped(actions([math.log(ratio)], [0.0], [advantage]), eps_clip=0.2, **settings)
    return float(loss)


def test_clipped_terms_equal_those_worked_by_hand():
    assert one_token(1.0, 1.5) == pytest.approx(-1.2)
    assert one_token(-1.0, 0.5) == pytest.approx(0.8)
    assert one_token(-1.0, 4.0) == pytest.approx(4.0)
    assert one_token(-1.0, 4.0, c_clip=3.0) == pytest.approx(3.0)
    assert one_token(1.0, 4.0, c_clip=1.1) == pytest.approx(-1.2), (
        "dual clip is for negative advantages"
    )


def slow_clipped(new, old, advantages, mask, eps, c_clip):
    losses, beyond, dual = [], 0, 0
    for n, o, a, m in zip(new, old, advantages, mask, strict=True):
        if not m:
            continue
        ratio = math.exp(n - o)
        plain, bounded = a * ratio, a * min(max(ratio, 1 - eps), 1 + eps)
        objective = min(plain, bounded)
        beyond += bounded < plain
        if c_clip is not None and a < 0 and c_clip * a > objective:
            objective = c_clip * a
            dual += 1
        losses.append(-objective)
    return losses, beyond, dual


numbers = st.floats(-2, 2, width=32)
tokens = st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=1, max_size=12)


@given(tokens, st.sampled_from([None, 1.5, 3.0]))
def test_the_clipped_loss_equals_the_formula(rows, c_clip):
    new, old, advantages, mask = (list(column) for column in zip(*rows, strict=True))
    losses, stats = clipped(actions(new, old, advantages, mask), eps_clip=0.2, c_clip=c_clip)
    expected, beyond, dual = slow_clipped(new, old, advantages, mask, 0.2, c_clip)
    assert losses.tolist() == pytest.approx(expected, abs=1e-9)
    assert float(stats["clip_fraction"]) == beyond
    assert float(stats["dual_clip_fraction"]) == dual
    ratios = sum(math.exp(n - o) for n, o, m in zip(new, old, mask, strict=True) if m)
    assert float(stats["importance_ratio"]) == pytest.approx(ratios)


def test_the_mean_ratio_of_a_sequence_equals_that_worked_by_hand():
    """Two sequences of two actions; the ratio is the geometric mean of those of the tokens."""
    new = torch.tensor(
        [math.log(2.0), math.log(0.5), math.log(1.5), 0.0], dtype=torch.float64, requires_grad=True
    )
    inputs = Actions(
        new,
        torch.zeros(4),
        torch.tensor([1.0, 1.0, 1.0, -3.0]),
        torch.ones(4, dtype=torch.bool),
        [3, 3],
    )
    losses, stats = mean_clipped(inputs, eps_clip=0.1)
    # 1.2247: above 1.1, which cuts a good action's gradient, and not a bad one's
    second = math.sqrt(1.5)
    assert losses.tolist() == pytest.approx([-1.0, -1.0, -1.1, 3 * second])
    assert float(stats["clip_fraction"]) == 1
    assert float(stats["importance_ratio"]) == pytest.approx(2 + 2 * second)
    assert float(stats["approx_kl"]) == pytest.approx(-math.log(1.5))
    losses.sum().backward()
    # d ratio / d logprob = ratio / 2, for each of the two tokens of a sequence,
    # from both of its losses
    assert new.grad.tolist() == pytest.approx([-1.0, -1.0, 1.5 * second, 1.5 * second])


@given(tokens)
def test_sequences_of_one_action_have_the_ratio_of_their_token(rows):
    new, old, advantages, mask = (list(column) for column in zip(*rows, strict=True))
    inputs = actions(new, old, advantages, mask, seqlens=[2] * len(rows))
    by_token, stats = clipped(inputs, eps_clip=0.2)
    for clipped_as_one in (mean_clipped, product_clipped):
        by_sequence, others = clipped_as_one(inputs, eps_clip=0.2)
        torch.testing.assert_close(by_sequence, by_token)
        assert float(others["clip_fraction"]) == float(stats["clip_fraction"])


def test_prompts_and_other_sequences_do_not_enter_a_sequences_ratio():
    mask = torch.tensor([False, True, True, False, True])
    new = torch.tensor([9.0, 0.2, 0.4, float("nan"), -0.6])
    losses, _ = mean_clipped(
        Actions(new, torch.zeros(5), -torch.ones(5), mask, [4, 3]), eps_clip=0.5
    )
    assert losses.tolist() == pytest.approx(
        [math.exp(0.3)] * 2 + [math.exp(-0.6) if math.exp(-0.6) > 0.5 else 0.5]
    )


@pytest.mark.parametrize("loss", [clipped, mean_clipped, product_clipped])
def test_the_upper_clip_may_differ_from_the_lower(loss):
    """Clip-higher: a good action counts up to 1.5, and a bad one still down to 0.8 only."""
    for ratio, advantage, expected in (
        (1.4, 1.0, -1.4),
        (2.0, 1.0, -1.5),
        (0.5, -1.0, 0.8),
        (0.9, -1.0, 0.9),
    ):
        losses, _ = loss(
            actions([math.log(ratio)], [0.0], [advantage]), eps_clip=0.2, eps_clip_high=0.5
        )
        assert losses.tolist() == pytest.approx([expected])


def two_sequences():
    """Ratios 2 · 0.5 · 1.5 = 1.5 and 0.9 · 1.1 = 0.99; advantages 1 and -2."""
    new = torch.tensor([2.0, 0.5, 1.5, 0.9, 1.1], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0] * 3 + [-2.0] * 2)
    return Actions(new, torch.zeros(5), advantages, torch.ones(5, dtype=torch.bool), [4, 3])


def test_the_product_ratio_of_a_sequence_equals_that_worked_by_hand():
    """1.5 is clipped at 1.2; the loss of each sequence is spread evenly."""
    inputs = two_sequences()
    new = inputs.logprobs
    losses, _ = product_clipped(inputs, eps_clip=0.2)
    assert losses.tolist() == pytest.approx([-0.4] * 3 + [0.99] * 2)
    losses.sum().backward()
    assert new.grad.tolist() == pytest.approx([0, 0, 0, 1.98, 1.98])


@pytest.mark.parametrize(
    ("aggregation", "settings"), [("sequence", {}), ("constant", {"loss_constant": 1.0})]
)
def test_a_sequence_as_one_action_has_the_same_weight_however_long(aggregation, settings):
    """Losses of -1.2 and 1.98."""
    inputs = two_sequences()
    losses, _ = product_clipped(inputs, eps_clip=0.2, loss_aggregation=aggregation)
    shares, total = LOSS_AGGREGATIONS[aggregation](inputs.mask, inputs.seqlens, **settings)
    mean = (losses * shares).sum().detach() / total
    assert float(mean) == pytest.approx((-1.2 + 1.98) / 2)


def test_clipped_weights_keep_the_gradient_of_every_token():
    """-weight · A · log-prob: the weights 4 and 0.1 are clipped to 1.5 and 0.8;
    the gradient is -weight · A."""
    new = torch.tensor([4.0, 0.1, 1.25], dtype=torch.float64).log().requires_grad_()
    inputs = Actions(
        new, torch.zeros(3), torch.tensor([1.0, 1.0, -2.0]), torch.ones(3, dtype=torch.bool), [4]
    )
    losses, stats = clipped_weights(inputs, eps_clip=0.2, eps_clip_high=0.5)
    assert losses.tolist() == pytest.approx(
        [-1.5 * math.log(4), -0.8 * math.log(0.1), 2.5 * math.log(1.25)]
    )
    losses.sum().backward()
    assert new.grad.tolist() == pytest.approx([-1.5, -0.8, 2.5])
    assert float(stats["clip_fraction"]) == 2
    free, _ = clipped_weights(inputs, eps_clip=1.0, eps_clip_high=0.5)
    assert float(free.detach()[1]) == pytest.approx(-0.1 * math.log(0.1)), "without a lower bound"


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_the_soft_gate_equals_that_worked_by_hand():
    """The slope of 4/τ σ(τ(ratio - 1)) is 4 σ(1 - σ)."""
    new = torch.tensor([3.0, 3.0, 1.0], dtype=torch.float64).log().requires_grad_()
    inputs = actions_from(new, [1.0, -2.0, -1.0])
    losses, _ = soft_gated(inputs, tau_pos=0.5, tau_neg=1.0)
    assert losses.tolist() == pytest.approx([-8 * sigmoid(1), 8 * sigmoid(2), 2.0])
    losses.sum().backward()
    slopes = [-12 * sigmoid(1) * sigmoid(-1), 24 * sigmoid(2) * sigmoid(-2), 1.0]
    assert new.grad.tolist() == pytest.approx(slopes)


def actions_from(new, advantages):
    """Of one sequence, with log-probs that have a gradient, and old ones of 0."""
    mask = torch.ones(len(new), dtype=torch.bool)
    return Actions(new, torch.zeros(len(new)), torch.tensor(advantages), mask, [len(new) + 1])


def test_tokens_beyond_a_total_variation_are_left_out_in_the_direction_of_their_advantage():
    """Probabilities that move by 0.15, each in both directions: allowed is 0.1 down and 0.2 up."""
    rows = [
        (0.45, 0.3, 1.0, False),  # up, within 0.2
        (0.55, 0.3, 1.0, True),  # up, beyond
        (0.55, 0.3, -1.0, False),  # up, but to be pushed back
        (0.3, 0.45, -1.0, True),  # down, beyond 0.1
        (0.3, 0.45, 1.0, False),
        (0.02, 0.001, 1.0, False),  # twenty times as likely, and still rare
    ]
    new, old, advantages, left_out = zip(*rows, strict=True)
    logs = [[math.log(p) for p in column] for column in (new, old)]
    losses, stats = within_total_variation(
        actions(*logs, advantages), eps_clip=0.1, eps_clip_high=0.2
    )
    expected = [0.0 if out else -a * n / o for n, o, a, out in rows]
    assert losses.tolist() == pytest.approx(expected)
    assert float(stats["clip_fraction"]) == sum(left_out)


probabilities = st.floats(1e-6, 1 - 1e-6)


def total_variation_of_coins(p, q):
    return (abs(p - q) + abs((1 - p) - (1 - q))) / 2


def kl_of_coins(p, q):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


DIVERGENCES = [
    (within_total_variation, total_variation_of_coins),
    (within_binary_kl, kl_of_coins),
]


@pytest.mark.parametrize(("loss", "divergence"), DIVERGENCES, ids=["tv", "kl"])
@given(probabilities, probabilities, numbers, st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_divergences_are_those_of_whether_the_token_is_chosen(loss, divergence, p, q, a, low, high):
    """As of two coins, over heads and tails."""
    bound, leads_away = (high, p > q) if a > 0 else (low, p < q)
    distance = divergence(p, q)
    assume(abs(distance - bound) > 1e-9)
    inputs = actions([math.log(p)], [math.log(q)], [a])
    losses, _ = loss(inputs, eps_clip=low, eps_clip_high=high)
    expected = 0.0 if distance > bound and leads_away else -a * p / q
    assert losses.tolist() == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
class TestEveryLoss:
    """What holds for every loss: a new one is tested as soon as it is in the table."""

    def loss(self, name, inputs):
        settings = {"eps_clip": 0.2, "tau_pos": 1.0, "tau_neg": 1.05}
        parameters = inspect.signature(POLICY_LOSSES[name]).parameters
        return POLICY_LOSSES[name](
            inputs, **{key: value for key, value in settings.items() if key in parameters}
        )

    def test_nan_in_masked_tokens_reaches_neither_loss_nor_gradient(self, name):
        nan = float("nan")
        new = torch.tensor([0.1, nan, float("inf")], requires_grad=True)
        mask = torch.tensor([True, False, False])
        old, advantages = torch.tensor([0.0, 1.0, nan]), torch.tensor([1.0, nan, 2.0])
        losses, _ = self.loss(name, Actions(new, old, advantages, mask, [2, 3]))
        losses.sum().backward()
        assert losses.isfinite().all()
        assert new.grad[0] != 0
        assert new.grad[1:].tolist() == [0.0, 0.0]

    def test_the_loss_of_an_extreme_token_is_finite(self, name):
        losses, _ = self.loss(name, actions([0.0], [-500.0], [-1.0]))
        assert losses.isfinite().all()

    def test_a_batch_without_trained_tokens_gives_zero_gradients(self, name):
        new = torch.zeros(3, requires_grad=True)
        none = torch.zeros(3, dtype=torch.bool)
        losses, stats = self.loss(name, Actions(new, torch.zeros(3), torch.zeros(3), none, [4]))
        losses.sum().backward()
        assert losses.shape == (0,)
        assert stats["importance_ratio"] == 0
        assert new.grad.tolist() == [0, 0, 0]

    def test_the_gradient_at_the_old_policy_is_the_policy_gradient(self, name):
        """Σ -A_t ∇ log p_t over a sequence of equal advantages, whatever the ratio is of."""
        new = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        advantages = torch.tensor([2.0, 2.0, -1.0, -1.0], dtype=torch.float64)
        mask = torch.ones(4, dtype=torch.bool)
        losses, _ = self.loss(name, Actions(new, torch.zeros(4), advantages, mask, [3, 3]))
        losses.sum().backward()
        assert new.grad.tolist() == pytest.approx([-2.0, -2.0, 1.0, 1.0])

    def test_sequences_do_not_influence_each_other(self, name):
        generator = torch.Generator().manual_seed(0)
        columns = [torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3)]
        mask = torch.tensor([True, True, False, True, True, False, True])
        expected, stats = self.loss(name, Actions(*columns, mask, [4, 3, 3]))
        parts = [
            self.loss(
                name,
                Actions(
                    *(column[actions_of_one] for column in columns), mask[actions_of_one], [length]
                ),
            )
            for actions_of_one, length in ((slice(0, 3), 4), (slice(3, 5), 3), (slice(5, 7), 3))
        ]
        torch.testing.assert_close(torch.cat([losses for losses, _ in parts]), expected)
        for key, value in stats.items():
            assert float(value) == pytest.approx(sum(float(sums[key]) for _, sums in parts))


def test_aggregations_equal_those_worked_by_hand():
    """Three responses: two trained tokens, none, one."""
    mask, seqlens = torch.tensor([False, True, True, False, True]), [4, 2, 2]
    shares, total = token_mean(mask, seqlens)
    assert (shares.tolist(), int(total)) == ([1.0, 1.0, 1.0], 3)
    shares, total = sequence_mean(mask, seqlens)
    assert (shares.tolist(), int(total)) == ([0.5, 0.5, 1.0], 2)
    shares, total = constant_mean(mask, seqlens, loss_constant=8)
    assert (shares.tolist(), int(total)) == ([0.125] * 3, 3), (
        "a response without tokens to train on counts too"
    )


@pytest.mark.parametrize("name", LOSS_AGGREGATIONS)
def test_aggregating_no_tokens_gives_no_shares(name):
    settings = {"loss_constant": 8.0} if name == "constant" else {}
    shares, total = LOSS_AGGREGATIONS[name](torch.zeros(3, dtype=torch.bool), [2, 3], **settings)
    assert (len(shares), int(total)) == (0, 2 if name == "constant" else 0)


def weights_of(ratios, mask=None, seqlens=None, **settings):
    """(weights, remaining mask) of behaviour log-probs of 0."""
    mask = [True] * len(ratios) if mask is None else mask
    proximal = torch.tensor(ratios, dtype=torch.float64).log()
    columns = (proximal, torch.zeros_like(proximal), torch.tensor(mask))
    weights, remaining = behaviour_weights(*columns, seqlens or [len(ratios) + 1], **settings)
    return weights.tolist(), remaining.tolist()


def test_tokens_outside_the_bounds_are_left_out_of_sum_and_count_or_get_the_bound():
    ratios, mask = [1.0, 6.0, 0.1, 1.5, 9.0], [True, True, True, True, False]
    weights, remaining = weights_of(ratios, mask, cap=5.0)
    assert (weights, remaining) == ([1.0, 0.0, pytest.approx(0.1), 1.5, 0.0], [1, 0, 1, 1, 0])
    weights, remaining = weights_of(ratios, mask, cap=5.0, floor=0.5)
    assert (weights, remaining) == ([1.0, 0.0, 0.0, 1.5, 0.0], [1, 0, 0, 1, 0])
    weights, remaining = weights_of(ratios, mask, cap=5.0, floor=0.5, mode="truncate")
    assert (weights, remaining) == ([1.0, 5.0, 0.5, 1.5, 0.0], mask)
    assert weights_of(ratios, mask)[1] == mask, "without bounds"


def test_a_sequence_has_one_weight_of_the_tokens_that_are_trained_on():
    """Products 4 · 0.5 = 2 and 0.1 · 0.4 = 0.04; geometric means √2 and 0.2."""
    ratios, mask = [9.0, 4.0, 0.5, 0.1, 0.4], [False, True, True, True, True]
    arguments = {"mask": mask, "seqlens": [4, 3]}
    weights, _ = weights_of(ratios, **arguments, level="sequence")
    assert weights == pytest.approx([0, 2, 2, 0.04, 0.04])
    weights, _ = weights_of(ratios, **arguments, level="geometric")
    assert weights == pytest.approx([0, 2**0.5, 2**0.5, 0.2, 0.2])
    _, remaining = weights_of(ratios, **arguments, level="sequence", cap=1.9)
    assert remaining == [False, False, False, True, True], "a response is left out as a whole"
    weights, remaining = weights_of(
        ratios, **arguments, level="sequence", cap=1.9, floor=0.5, mode="truncate"
    )
    assert (weights, remaining) == ([0, 1.9, 1.9, 0.5, 0.5], mask)


def test_weights_do_not_read_masked_tokens():
    nan = float("nan")
    weights, remaining = weights_of([nan, 2.0], [False, True], level="sequence", cap=3.0)
    assert (weights, remaining) == ([0.0, pytest.approx(2.0)], [False, True])
