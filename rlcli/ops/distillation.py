"""Distance of a student from its teacher on the student's own text: the reverse KL, KL(student ||
teacher), per token.

In both estimates, the gradient of a token's KL reaches only its own logits, and not the tokens that
were sampled before it, as in GKD (Agarwal et al. 2023, arXiv:2306.13649) on the student's own
samples. In expectation over the vocabulary, their gradients are the same.
"""

from __future__ import annotations

import torch

__all__ = ["full_reverse_kl", "sampled_reverse_kl"]


def sampled_reverse_kl(
    logprobs: torch.Tensor, teacher: torch.Tensor, sampled: torch.Tensor, ratio_cap: float
) -> torch.Tensor:
    """[A] a term for each sampled token whose gradient is an unbiased estimate of that of the
    reverse KL.

    `logprobs` are the student's current ones, `teacher` the teacher's, `sampled` those at sampling
    time, all [A]. The term is w / 2 * (log p - log q)^2 with the gradient w * (log p - log q) * d
    log p, where w = p / p_sampled, at most `ratio_cap` and without a gradient, corrects for updates
    since the tokens were sampled.
    """
    weight = (logprobs.detach() - sampled).exp().clamp(max=ratio_cap)
    return 0.5 * weight * (logprobs - teacher).square()


def full_reverse_kl(logprobs: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """[A] the reverse KL at each position, from the log-probs [A, V] of all tokens: exact,
    with its exact gradient."""
    return (logprobs.exp() * (logprobs - teacher)).sum(-1)
