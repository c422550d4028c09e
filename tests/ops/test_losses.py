import pytest
import torch

from rlcli.ops.losses import nll_loss, ppo_critic_loss

ONE = torch.tensor([True])


def test_nan_in_masked_values_reaches_neither_loss_nor_gradient():
    nan = float("nan")
    values = torch.tensor([nan, 0.5], requires_grad=True)
    loss, _ = ppo_critic_loss(
        values, torch.tensor([nan, 0.4]), torch.tensor([1.0, 1.0]), torch.tensor([False, True]), 0.2
    )
    loss.backward()
    assert values.grad[0] == 0
    assert values.grad[1] == pytest.approx(-0.5)


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_critic_loss_takes_the_worse_of_clipped_and_unclipped(kind):
    """Three of five values are right, but further from the old ones than the clip."""
    values, old = torch.tensor([1.0, -1.0, 30.2, 1.0, 30.0]), torch.zeros(5)
    returns, mask = torch.tensor([1.0, -1.0, 30.2, 0.0, 0.0]), torch.ones(5, dtype=torch.bool)
    loss, stats = ppo_critic_loss(values, old, returns, mask, 0.2, kind)
    far = 0.5 * 900 if kind == "mse" else 10 * (30 - 5)
    assert float(loss) == pytest.approx(0.8**2 + far + 0.5 * 1.0 + far)
    assert float(stats["value_clip_fraction"]) == 3


def test_values_that_moved_less_than_the_clip_do_not_count_as_clipped():
    """`old + (value - old)` is seldom `value` to the last bit."""
    generator = torch.Generator().manual_seed(0)
    values, old, returns = 0.09 * (2 * torch.rand(3, 4096, generator=generator) - 1)
    values = values.clone().requires_grad_()
    loss, stats = ppo_critic_loss(values, old, returns, torch.ones(4096, dtype=torch.bool), 0.2)
    loss.backward()
    assert float(stats["value_clip_fraction"]) == 0
    assert torch.equal(values.grad, values.detach() - returns)


def test_nll_is_a_sum_over_the_mask():
    assert (
        float(nll_loss(torch.tensor([-1.0, -2.0, float("nan")]), torch.tensor([True, True, False])))
        == 3.0
    )


def test_an_unknown_value_loss_is_refused():
    with pytest.raises(ValueError, match="mse or huber"):
        ppo_critic_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), ONE, 0.2, "mae")
