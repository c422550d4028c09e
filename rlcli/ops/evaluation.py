"""Measures of several responses to one prompt: whether one of k is right,
and what the majority answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import torch

__all__ = ["answer_classes", "majority", "pass_at_k"]


def pass_at_k(samples: torch.Tensor, correct: torch.Tensor, k: int) -> torch.Tensor:
    """[P] float64: unbiased estimate of the probability that at least one of k responses to a
    prompt is right.

    `samples` [P] counts the responses to each prompt (n), `correct` [P] those that are right (c).
    The estimate is 1 - C(n - c, k) / C(n, k), the share of all subsets of k responses that contain
    a right one (Chen et al. 2021, arXiv:2107.03374, equation 1). Raises ValueError if a prompt has
    fewer than k responses, or more right ones than responses.
    """
    if k < 1 or bool((samples < k).any()):
        raise ValueError(
            f"pass@{k} needs at least {max(k, 1)} responses to each prompt, and a k of at least 1"
        )
    if bool(((correct < 0) | (correct > samples)).any()):
        raise ValueError("the right responses to a prompt are some of its responses")
    n, wrong = samples.to(torch.float64), (samples - correct).to(torch.float64)
    all_wrong = torch.ones_like(n)
    # C(n - c, k) / C(n, k) is a product of k factors; one of them is 0 if n - c < k
    for drawn in range(k):
        all_wrong = all_wrong * (wrong - drawn).clamp(min=0) / (n - drawn)
    return 1 - all_wrong


def answer_classes(answers: Sequence[Sequence[Hashable | None]]) -> torch.Tensor:
    """[N] int64: which answer each response gives, as in a batch's key `answer_classes`.

    `answers` holds, for each prompt, the answers of its responses; None for a response without an
    answer. Equal answers to one prompt get equal numbers, from 0 in the order in which they first
    appear; no answer gets -1.
    """
    classes: list[int] = []
    for group in answers:
        numbers: dict[Hashable, int] = {}
        classes += [
            -1 if answer is None else numbers.setdefault(answer, len(numbers)) for answer in group
        ]
    return torch.tensor(classes, dtype=torch.int64)


def majority(answers: Sequence[int]) -> int | None:
    """The index of the first response with the most frequent answer (self-consistency, Wang et al.
    2022, arXiv:2203.11171).

    `answers` has the number of each response's answer; equal numbers are equal answers, and a
    negative number is none. Among equally frequent answers, the one that was given first wins. None
    if no response gives an answer.
    """
    votes = Counter(answer for answer in answers if answer >= 0)
    if not votes:
        return None
    winner, _ = max(votes.items(), key=lambda vote: (vote[1], -answers.index(vote[0])))
    return answers.index(winner)
