import math

import pytest
import torch

from rlcli.ops.kl import AdaptiveKLController, FixedKLController, kl_estimate


def test_golden_k3():
    k3 = kl_estimate(torch.tensor([0.0]), torch.tensor([0.5]), "k3")
    assert float(k3) == pytest.approx(math.exp(0.5) - 1.5, rel=1e-6)
    assert float(k3) == pytest.approx(0.14872, abs=1e-5)


def test_estimators_agree_with_the_exact_kl():
    """k1 and k3 are unbiased: their expectation over the policy is the KL itself."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), estimator)).sum()) == pytest.approx(exact, abs=1e-6)
    assert (kl_estimate(p.log(), q.log(), "k3") >= 0).all()
    torch.testing.assert_close(kl_estimate(p.log(), q.log(), "k2"), 0.5 * (p / q).log() ** 2)


def test_unknown_estimator():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_golden_adaptive():
    controller = AdaptiveKLController(0.1, target=6, horizon=10_000)
    controller.update(12, 256)
    assert controller.coef == pytest.approx(0.100512)


def test_adaptive_goes_both_ways_and_rests_on_target():
    for kl, direction in ((3.0, -1), (6.0, 0), (60.0, 1)):
        controller = AdaptiveKLController(0.1, target=6, horizon=100)
        controller.update(kl, 10)
        assert (controller.coef > 0.1) - (controller.coef < 0.1) == direction


def test_fixed_stays():
    controller = FixedKLController(0.1)
    controller.update(100, 1000)
    assert controller.coef == 0.1


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_changes_nothing(kl):
    controller = AdaptiveKLController(0.1, target=6.0, horizon=100)
    controller.update(kl, 10)
    assert controller.coef == 0.1
