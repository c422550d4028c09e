import itertools
import math

import pytest
import torch

from rlcli.ops.kl import AdaptiveKLController, FixedKLController, kl_estimate, kl_loss, kl_of_policy


def test_k3_equals_a_number_worked_by_hand():
    k3 = kl_estimate(torch.tensor([0.0]), torch.tensor([0.5]), "k3")
    assert float(k3) == pytest.approx(math.exp(0.5) - 1.5, rel=1e-6)
    assert float(k3) == pytest.approx(0.14872, abs=1e-5)


def test_estimators_agree_with_the_exact_kl():
    """k1 and k3 are unbiased: their expectation over the policy is the KL itself."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), estimator)).sum()) == pytest.approx(
            exact, abs=1e-6
        )
    assert (kl_estimate(p.log(), q.log(), "k3") >= 0).all()
    torch.testing.assert_close(kl_estimate(p.log(), q.log(), "k2"), 0.5 * (p / q).log() ** 2)


LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.0, 2.0], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.1, -0.5, 0.7, -1.0], dtype=torch.float64).log_softmax(-1)


def gradient_of(loss):
    """Of a function of the log-probs of five tokens, to the logits."""
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits.log_softmax(-1)), logits, allow_unused=True)
    return gradient


OWN = LOGITS.log_softmax(-1)
OLD = torch.tensor([0.5, 0.5, 0.0, -1.0, 0.3], dtype=torch.float64).log_softmax(-1)


def expected_over_samples(estimator, gradient, sampler=OWN):
    """Of the penalty, where `sampler` draws the token: a choice that passes on no gradient."""
    return gradient_of(
        lambda logprobs: (
            sampler.exp() * kl_loss(logprobs, sampler, REFERENCE, estimator, gradient)
        ).sum()
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sampler", [OWN, OLD], ids=["on-policy", "off-policy"])
def test_the_expected_gradient_of_the_penalty_is_that_of_the_reverse_kl(estimator, sampler):
    """Exactly, as an expectation over the vocabulary, whichever policy sampled."""
    analytic = gradient_of(lambda logprobs: (logprobs.exp() * (logprobs - REFERENCE)).sum())
    assert analytic.abs().max() > 0.1
    torch.testing.assert_close(expected_over_samples(estimator, "reverse", sampler), analytic)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gradient", ["reverse", "naive"])
def test_the_penalty_has_the_value_of_its_estimator(estimator, gradient):
    expected = kl_estimate(OWN, REFERENCE, estimator)
    torch.testing.assert_close(kl_loss(OWN, OWN, REFERENCE, estimator, gradient), expected)
    weight = (OWN - OLD).exp() if gradient == "reverse" else 1.0
    torch.testing.assert_close(kl_loss(OWN, OLD, REFERENCE, estimator, gradient), weight * expected)


@pytest.mark.parametrize("sampler", [OWN, OLD], ids=["on-policy", "off-policy"])
def test_the_kl_of_a_policy_does_not_depend_on_which_policy_sampled(sampler):
    """Exactly, as an expectation over the vocabulary, and without a gradient."""
    logprobs = OWN.clone().requires_grad_()
    expected = (OWN.exp() * (OWN - REFERENCE)).sum()
    kl = kl_of_policy(logprobs, sampler, REFERENCE)
    torch.testing.assert_close((sampler.exp() * kl).sum(), expected)
    assert bool((kl >= 0).all())
    assert not kl.requires_grad


def test_naive_gradients_of_k1_and_k3_are_not_those_of_the_reverse_kl():
    """None for k1, that of the forward KL for k3; k2 happens to be right."""
    forward = gradient_of(lambda logprobs: (REFERENCE.exp() * (REFERENCE - logprobs)).sum())
    torch.testing.assert_close(expected_over_samples("k3", "naive"), forward)
    torch.testing.assert_close(
        expected_over_samples("k1", "naive"), torch.zeros(5, dtype=torch.float64)
    )
    torch.testing.assert_close(
        expected_over_samples("k2", "naive"), expected_over_samples("k2", "reverse")
    )


def test_the_penalty_of_an_extreme_token_is_finite():
    for freak, usual in ((-500.0, 0.0), (0.0, -500.0)):
        logprob, reference = torch.tensor([freak], requires_grad=True), torch.tensor([usual])
        for estimator, gradient in itertools.product(("k1", "k2", "k3"), ("reverse", "naive")):
            loss = kl_loss(logprob, reference, reference, estimator, gradient)
            assert loss.isfinite().all()
            assert torch.autograd.grad(loss.sum(), logprob)[0].isfinite().all()


def test_the_gradient_of_k3_leads_to_the_reference_however_far_away_it_is():
    logprobs = torch.tensor([-10.0, -19.5, -20.5, -60.0], requires_grad=True)
    k3 = kl_estimate(logprobs, torch.zeros(4), "k3")
    gradient = torch.autograd.grad(k3.sum(), logprobs)[0]
    assert (k3.diff() > 0).all()
    assert (gradient.diff() <= 0).all()
    assert gradient[-1] == pytest.approx(1 - math.exp(20))


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_an_adaptive_update_equals_that_worked_by_hand():
    controller = AdaptiveKLController(0.1, target=6, horizon=10_000)
    controller.update(12, 256)
    assert controller.coef == pytest.approx(0.100512)


def test_the_adaptive_coefficient_moves_towards_its_target():
    for kl, direction in ((3.0, -1), (6.0, 0), (60.0, 1)):
        controller = AdaptiveKLController(0.1, target=6, horizon=100)
        controller.update(kl, 10)
        assert (controller.coef > 0.1) - (controller.coef < 0.1) == direction


def test_the_adaptive_coefficient_stays_a_penalty_in_steps_longer_than_its_horizon():
    controller = AdaptiveKLController(0.1, target=6, horizon=100)
    controller.update(0.0, 800)
    assert controller.coef == pytest.approx(0.08)
    controller.update(12.0, 800)
    assert controller.coef == pytest.approx(0.096)


def test_the_fixed_coefficient_does_not_change():
    controller = FixedKLController(0.1)
    controller.update(100, 1000)
    assert controller.coef == 0.1


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_nonfinite_kl_leaves_the_coefficient_unchanged(kl):
    controller = AdaptiveKLController(0.1, target=6.0, horizon=100)
    controller.update(kl, 10)
    assert controller.coef == 0.1


@pytest.mark.parametrize(("start", "coef"), [(0.1, 0.102), (0.3, 0.3)])
def test_an_adaptive_coefficient_is_restored_unless_it_starts_from_another(start, coef):
    """A run may be resumed with another kl_ctl, which it then has."""
    before = AdaptiveKLController(0.1, target=6, horizon=100)
    before.update(60.0, 10)
    resumed = AdaptiveKLController(start, target=6, horizon=100)
    resumed.load_state_dict(before.state_dict())
    assert resumed.coef == pytest.approx(coef)
    again = AdaptiveKLController(start, target=6, horizon=100)
    again.load_state_dict(resumed.state_dict())
    assert again.coef == resumed.coef


def test_an_adaptive_coefficient_is_restored_from_a_state_without_its_start():
    controller = AdaptiveKLController(0.1, target=6, horizon=100)
    controller.load_state_dict({"coef": 0.05})
    assert controller.coef == 0.05
