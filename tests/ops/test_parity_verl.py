"""Losses and advantages that TRL lacks have the numbers of verl and of code derived from it.

verl itself needs more than a test may install, so its numbers are written down here: those of
`compute_policy_loss_dppo_tv` and `compute_policy_loss_dppo_kl` of verl 0.9.1, with
`clip_ratio_c=20`, which no ratio below reaches (rlcli has no such bound); and those of
`compute_maxrl_outcome_advantage` in the code that the authors of MaxRL published.
"""

import pytest
import torch

from rlcli.ops.advantages import Trajectories, relative
from rlcli.ops.policy_losses import POLICY_LOSSES, Actions

OLD = (0.90, 0.50, 0.05, 0.50, 0.80, 0.01, 0.30, 0.99, 0.60, 0.20, 0.001, 0.97)
NEW = (0.97, 0.62, 0.16, 0.38, 0.62, 0.15, 0.31, 0.86, 0.78, 0.02, 0.0004, 0.999)
"""Probabilities of twelve tokens under the policy that sampled and the one that is trained."""
ADVANTAGES = (1.0, 2.0, 0.5, -1.0, -0.5, 1.5, 1.0, -2.0, -1.0, 1.0, -1.0, 0.25)


@pytest.mark.parametrize(
    ("loss", "low", "high", "gradient"),
    [
        ("dppo_tv", 0.15, 0.15, (-1.077778, -2.48, -1.6, 0.76, 0.0, -22.5, -1.033333, 1.737374, 1.3,
                                 -0.1, 0.4, -0.257474)),
        ("dppo_tv", 0.12, 0.10, (-1.077778, 0.0, 0.0, 0.76, 0.0, 0.0, -1.033333, 0.0, 1.3, -0.1,
                                 0.4, -0.257474)),
        ("dppo_kl", 0.05, 0.05, (0.0, -2.48, 0.0, 0.76, 0.0, 0.0, -1.033333, 0.0, 1.3, -0.1, 0.4,
                                 0.0)),
        ("dppo_kl", 0.02, 0.03, (0.0, -2.48, 0.0, 0.0, 0.0, 0.0, -1.033333, 0.0, 1.3, -0.1, 0.4,
                                 0.0)),
    ],
)  # fmt: skip
def test_gradients_of_dppo_are_those_of_verl(loss, low, high, gradient):
    """Of the log-probs. Its loss is another number with the same gradient: the log-prob times a
    ratio without one, in place of the ratio."""
    new = torch.tensor(NEW, dtype=torch.float64).log().requires_grad_()
    old = torch.tensor(OLD, dtype=torch.float64).log()
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    trained = torch.ones(len(NEW), dtype=torch.bool)
    actions = Actions(new, old, advantages, trained, [len(NEW) + 1])
    losses, sums = POLICY_LOSSES[loss](actions, eps_clip=low, eps_clip_high=high)
    losses.sum().backward()
    assert new.grad.tolist() == pytest.approx(gradient, abs=1e-6)
    assert int(sums["clip_fraction"]) == gradient.count(0.0)


REWARDS = (
    (1.0, 0.0, 0.5, 1.0),
    (1.0, 1.0, 1.0, 1.0),
    (0.0, 0.0, 1.0, 0.25),
    (0.0, 0.0, 0.0, 0.0),
    (0.0, 1.0, 0.0, 0.0),
)
"""Of four responses to each of five prompts."""
MAXRL = (
    (0.6, -1.0, -0.2, 0.6),
    (0.0, 0.0, 0.0, 0.0),
    (-1.0, -1.0, 2.2, -0.2),
    (0.0, 0.0, 0.0, 0.0),
    (-1.0, 3.0, -1.0, -1.0),
)


def test_advantages_of_maxrl_are_those_of_its_authors():
    """Up to the 1e-6 that they add to the mean."""
    rewards = torch.tensor(REWARDS).flatten()
    count = len(rewards)
    nowhere = torch.zeros(count, dtype=torch.bool)
    prompts = torch.arange(count) // len(REWARDS[0])
    outcomes = Trajectories(
        rewards, torch.zeros(2 * count), ~nowhere, [2] * count, prompts, nowhere
    )
    advantages, _ = relative(outcomes, baseline="group", scale="mean")
    expected = torch.tensor(MAXRL).flatten()
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
