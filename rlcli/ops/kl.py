"""KL divergence between policies: its estimators, the penalty, and the penalty's coefficient.

Estimators of KL(p || q) from samples of p: J. Schulman, "Approximating KL Divergence" (2020).
Adaptive coefficient: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import torch

KLEstimator = Literal["k1", "k2", "k3"]
KLGradient = Literal["reverse", "naive"]

MAX_EXPONENT = 20.0
"""k3 exponentiates differences of log-probs up to this and continues along the tangent, so that a
single outlier token cannot make it infinite, and its gradient still leads to the reference."""


def kl_estimate(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator = "k1"
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) at tokens that the policy sampled;
    same shape as the inputs.

    With d = logprobs - ref_logprobs: k1 = d (unbiased, can be negative), k2 = d²/2 (biased, low
    variance), k3 = exp(-d) - 1 + d (unbiased, never negative).
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        tangent = math.exp(MAX_EXPONENT) * torch.relu(-difference - MAX_EXPONENT)
        return torch.expm1(-difference.clamp(min=-MAX_EXPONENT)) + difference + tangent
    raise ValueError(f"unknown KL estimator {estimator!r}; choose k1, k2 or k3")


def kl_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    estimator: KLEstimator,
    gradient: KLGradient = "reverse",
) -> torch.Tensor:
    """A KL penalty to be minimised, for each token that the old policy sampled; same shape as the
    inputs. Gradients flow to `logprobs`.

    reverse: ratio * estimate, with the gradient ratio * (logprobs - ref_logprobs) ∇ logprobs, where
    ratio = exp(logprobs - old_logprobs). Its expectation over the samples is the gradient of
    KL(policy || reference), whichever estimator gives the value (DeepSeek-V3.2, arXiv:2512.02556,
    multiplies k3 by the ratio, which is equivalent). naive: the estimate, with its own gradient. At
    the old policy, its expectation is 0 for k1, and for k3 the gradient of the *forward*
    KL(reference || policy): estimators are only unbiased in value (arXiv:2506.09477).
    """
    value = kl_estimate(logprobs, ref_logprobs, estimator)
    if gradient == "naive":
        return value
    ratio = _ratio(logprobs, old_logprobs)
    carrier = kl_estimate(logprobs, ref_logprobs, "k2")
    return ratio * (carrier + (value - carrier).detach())


def kl_of_policy(
    logprobs: torch.Tensor, sampled_logprobs: torch.Tensor, ref_logprobs: torch.Tensor
) -> torch.Tensor:
    """KL(policy || reference) for each token that another policy sampled, in nats; same shape as
    the inputs, without a gradient.

    ratio * k3, where ratio = exp(logprobs - sampled_logprobs): over the tokens that the sampling
    policy may choose, its expectation is the KL of the policy itself. What a token follows was
    still chosen by the sampling policy.
    """
    return _ratio(logprobs, sampled_logprobs) * kl_estimate(logprobs.detach(), ref_logprobs, "k3")


def _ratio(logprobs: torch.Tensor, sampled_logprobs: torch.Tensor) -> torch.Tensor:
    """How much more probable a token is under the policy than under the one that sampled it;
    without a gradient."""
    return (logprobs - sampled_logprobs).detach().clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


class KLController(Protocol):
    """Holds the coefficient of the KL penalty."""

    coef: float

    def update(self, kl: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedKLController:
    """A coefficient that never changes."""

    def __init__(self, coef: float):
        self.coef = coef

    def update(self, kl: float, n_steps: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Empty, so that a coefficient changed in the recipe takes effect on resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class AdaptiveKLController:
    """Raises the coefficient while the KL is above `target`, and lowers it while below.

    error = clip(kl / target - 1, -0.2, 0.2);  coef *= 1 + error * min(n_steps / horizon, 1)
    """

    def __init__(self, coef: float, target: float, horizon: float):
        if not (target > 0 and horizon > 0):
            raise ValueError(f"the KL target ({target}) and horizon ({horizon}) must be above 0")
        self.coef = self.start = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n_steps: float) -> None:
        """`kl`: the true KL of this batch, summed over a response and averaged over responses, in
        nats (never multiplied by the coefficient); `n_steps`: the responses in the batch, over all
        ranks. Call once per step. A `kl` that is not finite changes nothing.
        """
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        n_steps = min(n_steps, self.horizon)  # with more, a penalty could become a reward
        self.coef *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient. The recipe's is kept if it has changed since it was the start,
        and after a fixed controller, whose state has none."""
        if state.get("start", self.start) == self.start:
            self.coef = state.get("coef", self.coef)
