"""Distances from a teacher by their formulas, and that both have the same gradient on average."""

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from rlcli.ops.distillation import full_reverse_kl, sampled_reverse_kl


def test_a_sampled_token_has_half_its_squared_lead_times_a_bounded_weight():
    """Leads of 1/2 and -1, and weights of e^(1/5) and of 2 in place of e^2, which have no
    gradient."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    teacher, sampled = torch.tensor([-1.5, -1.0]), torch.tensor([-1.2, -4.0])
    terms = sampled_reverse_kl(logprobs, teacher, sampled, ratio_cap=2.0)
    weight = torch.tensor(0.2).exp().item()
    assert terms.tolist() == pytest.approx([weight / 8, 1.0])
    terms.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([weight / 2, -2.0])


def test_sampled_and_exact_distances_have_the_same_gradient_on_average():
    logits, teacher, sampled = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    teacher, sampled = teacher.log_softmax(-1), sampled.log_softmax(-1)
    exact = full_reverse_kl(logits.log_softmax(-1)[None], teacher[None]).sum()
    expected = kl_divergence(Categorical(logits=logits), Categorical(logits=teacher))
    assert exact.item() == pytest.approx(expected.item(), rel=1e-5)
    terms = sampled_reverse_kl(logits.log_softmax(-1), teacher, sampled, ratio_cap=1e3)
    (of_exact,) = torch.autograd.grad(exact, logits)
    (on_average,) = torch.autograd.grad((sampled.exp() * terms).sum(), logits)
    torch.testing.assert_close(on_average, of_exact)
