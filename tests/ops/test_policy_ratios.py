"""Ratios of whole sequences: bounded as a product, and reported token by token."""

import pytest
import torch

from rlcli.ops.policy_losses import POLICY_LOSSES, Actions, behaviour_weights

MASK, LENGTHS = torch.tensor([True, True, False, True]), [4, 2]


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sequence", "dppo_tv", "dppo_kl"])
def test_approx_kl_is_the_sum_of_what_tokens_became_less_likely(name):
    new, old = torch.tensor([[-1.0, -2.0, -3.0, -1.5], [-1.1, -1.7, 0.0, -1.25]])
    actions = Actions(new, old, torch.ones(4), MASK, LENGTHS)
    _, stats = POLICY_LOSSES[name](actions, eps_clip=0.2)
    assert float(stats["approx_kl"]) == pytest.approx(-0.1 + 0.3 + 0.25)


def test_weights_of_sequences_are_bounded_as_a_product():
    proximal = torch.tensor([1e12, 1e-10]).log()
    weights, _ = behaviour_weights(
        proximal, torch.zeros(2), torch.ones(2).bool(), [3], level="sequence"
    )
    assert weights.tolist() == pytest.approx([100.0, 100.0], rel=1e-4)
