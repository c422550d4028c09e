import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.ops.losses import behaviour_weights, nll_loss, ppo_actor_loss, ppo_critic_loss

ONE = torch.tensor([True])


def one_token(advantage, ratio, **settings):
    loss, _ = ppo_actor_loss(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), ONE, 0.2, **settings
    )
    return float(loss)


def test_golden_terms():
    assert one_token(1.0, 1.5) == pytest.approx(-1.2)
    assert one_token(-1.0, 0.5) == pytest.approx(0.8)
    assert one_token(-1.0, 4.0) == pytest.approx(4.0)
    assert one_token(-1.0, 4.0, c_clip=3.0) == pytest.approx(3.0)
    assert one_token(1.0, 4.0, c_clip=3.0) == pytest.approx(-1.2), "dual clip is for negative advantages"


def slow_actor_loss(new, old, advantages, mask, eps, c_clip, weights):
    total = clipped = dual = 0.0
    for n, o, a, m, w in zip(new, old, advantages, mask, weights, strict=True):
        if not m:
            continue
        ratio = math.exp(n - o)
        plain, bounded = a * ratio, a * min(max(ratio, 1 - eps), 1 + eps)
        objective = min(plain, bounded)
        clipped += bounded < plain
        if c_clip is not None and a < 0 and c_clip * a > objective:
            objective = c_clip * a
            dual += 1
        total -= w * objective
    return total, clipped, dual


numbers = st.floats(-2, 2, width=32)
tokens = st.lists(
    st.tuples(numbers, numbers, numbers, st.booleans(), st.floats(0.125, 2, width=32)),
    min_size=1,
    max_size=12,
)


@given(tokens, st.sampled_from([None, 1.5, 3.0]), st.booleans())
def test_actor_loss_equals_the_formula(rows, c_clip, weighted):
    new, old, advantages, mask, weights = (list(column) for column in zip(*rows, strict=True))
    weights = weights if weighted else [1.0] * len(rows)
    loss, stats = ppo_actor_loss(
        *(torch.tensor(column, dtype=torch.float64) for column in (new, old, advantages)),
        torch.tensor(mask), 0.2, c_clip, torch.tensor(weights, dtype=torch.float64) if weighted else None,
    )  # fmt: skip
    expected, clipped, dual = slow_actor_loss(new, old, advantages, mask, 0.2, c_clip, weights)
    assert float(loss) == pytest.approx(expected, abs=1e-9)
    assert float(stats["clip_fraction"]) == clipped
    assert float(stats["dual_clip_fraction"]) == dual
    ratios = sum(math.exp(n - o) for n, o, m in zip(new, old, mask, strict=True) if m)
    assert float(stats["importance_ratio"]) == pytest.approx(ratios)


def test_masked_tokens_cannot_spoil_loss_or_gradient():
    nan = float("nan")
    new = torch.tensor([0.1, nan, float("inf")], requires_grad=True)
    mask = torch.tensor([True, False, False])
    loss, _ = ppo_actor_loss(new, torch.tensor([0.0, 1.0, nan]), torch.tensor([1.0, nan, 2.0]), mask, 0.2, 3.0)
    loss.backward()
    assert loss.isfinite()
    assert new.grad[0] != 0
    assert new.grad[1:].tolist() == [0.0, 0.0]
    values = torch.tensor([nan, 0.5], requires_grad=True)
    loss, _ = ppo_critic_loss(
        values, torch.tensor([nan, 0.4]), torch.tensor([1.0, 1.0]), torch.tensor([False, True]), 0.2
    )
    loss.backward()
    assert values.grad[0] == 0
    assert values.grad[1] == pytest.approx(-0.5)


def test_a_freak_token_keeps_the_loss_finite():
    loss, _ = ppo_actor_loss(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), ONE, 0.2)
    assert loss.isfinite()


def test_nothing_to_train_on_is_zero_with_a_graph():
    new = torch.zeros(3, requires_grad=True)
    none = torch.zeros(3, dtype=torch.bool)
    loss, stats = ppo_actor_loss(new, torch.zeros(3), torch.zeros(3), none, 0.2)
    loss.backward()
    assert loss.detach() == 0
    assert stats["importance_ratio"] == 0
    assert new.grad.tolist() == [0, 0, 0]


def test_capped_tokens_leave_numerator_and_denominator():
    proximal, behaviour = torch.tensor([0.0, 2.0, 0.5, 9.0]), torch.tensor([0.0, 0.0, 0.0, 0.0])
    mask = torch.tensor([True, True, True, False])
    weights, kept = behaviour_weights(proximal, behaviour, mask, cap=5.0)
    assert kept.tolist() == [True, False, True, False]
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.0, math.exp(0.5), 0.0]))
    _, uncapped = behaviour_weights(proximal, behaviour, mask)
    assert uncapped.tolist() == mask.tolist()


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_critic_loss_takes_the_worse_of_clipped_and_unclipped(kind):
    values, old = torch.tensor([1.0, 1.0, 30.0]), torch.tensor([0.0, 0.0, 0.0])
    returns, mask = torch.tensor([1.0, 0.0, 0.0]), torch.ones(3, dtype=torch.bool)
    loss, stats = ppo_critic_loss(values, old, returns, mask, 0.2, kind)
    far = 0.5 * 900 if kind == "mse" else 10 * (30 - 5)
    assert float(loss) == pytest.approx(0.5 * 0.8**2 + 0.5 * 1.0 + far)
    assert float(stats["value_clip_fraction"]) == 1


def test_a_value_that_moved_less_than_the_clip_is_not_counted_as_clipped():
    """`old + (value - old)` is seldom `value` to the last bit."""
    generator = torch.Generator().manual_seed(0)
    values, old, returns = 0.09 * (2 * torch.rand(3, 4096, generator=generator) - 1)
    values = values.clone().requires_grad_()
    loss, stats = ppo_critic_loss(values, old, returns, torch.ones(4096, dtype=torch.bool), 0.2)
    loss.backward()
    assert float(stats["value_clip_fraction"]) == 0
    assert torch.equal(values.grad, values.detach() - returns)


def test_nll_is_a_sum_over_the_mask():
    assert float(nll_loss(torch.tensor([-1.0, -2.0, float("nan")]), torch.tensor([True, True, False]))) == 3.0


def test_unknown_value_loss():
    with pytest.raises(ValueError, match="mse or huber"):
        ppo_critic_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), ONE, 0.2, "mae")
