"""What an evaluation measures: from the keys of a call's outputs to one number per prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import ANSWER_CLASSES, MEANINGS, NOT_ENDED, PROMPT_MASK, REWARDS, SOLVED
from rlcli.ops.evaluation import majority, pass_at_k


@dataclass(frozen=True)
class Moments:
    """The sums that the mean of some numbers and its standard error require. Those of several ranks can be added."""

    total: float = 0.0
    squares: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Moments:
        taken = list(numbers)
        return cls(sum(taken), sum(number * number for number in taken), len(taken))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, from the spread of the numbers; NaN for fewer than two."""
        if self.count < 2:
            return math.nan
        spread = max(0.0, self.squares - self.total * self.mean) / (self.count - 1)
        return math.sqrt(spread / self.count)


def scores_of(made: SequenceSample, outputs: Mapping[str, str], *, evaluates: bool) -> dict[str, list[float]]:
    """Scores of responses in a call's outputs, in training or in an evaluation; `outputs`: the interface's name for a
    key → key of the batch."""
    of_reward = tuple(outputs.values()) if REWARDS in outputs else ()
    return (measures if evaluates else shown_scores)(made, of_reward)


def shown_scores(made: SequenceSample, of_reward: Iterable[str] = ()) -> dict[str, list[float]]:
    """The scores to report of a call's outputs: name → one number per response. `of_reward`: the output keys of a call
    that gives rewards, all of whose scores are reported."""
    return {name: _tensor(made, key).double().tolist() for name, key in _shown(made, of_reward).items()}


def _shown(made: SequenceSample, of_reward: Iterable[str]) -> dict[str, str]:
    """Name → key."""
    known = {meaning.shown_as: key for key, meaning in MEANINGS.items() if meaning.shown_as and key in made.keys}
    own = {key: key for key in of_reward if key not in MEANINGS and _is_score(made, key)}
    return {**own, **known}


def _is_score(made: SequenceSample, key: str) -> bool:
    tensor = (made.data or {}).get(key)
    one_each = all(length == 1 for group in made.seqlens.get(key, ()) for length in group)
    return tensor is not None and tensor.dim() == 1 and one_each and not tensor.dtype.is_complex


def measures(made: SequenceSample, of_reward: Iterable[str] = ()) -> dict[str, list[float]]:
    """What an evaluation reports of a call's outputs: name → one number per prompt; `of_reward` as above.

    The means of scores over the responses to a prompt (`reward`, `accuracy`); with several responses to each prompt,
    `pass@k` for k = 2, 4, 8, … and for all n of them, and `majority@n`, whether the most frequent final answer is
    right; `response_length` in tokens; `no_eos_fraction`, the share that was cut off.
    """
    found = {name: [_mean(group) for group in _groups(made, key)] for name, key in _shown(made, of_reward).items()}
    if SOLVED in made.keys:
        found |= _of_groups(made)
    if PROMPT_MASK in made.keys:
        found["response_length"] = [_mean(map(_false, group)) for group in _sequences(made, PROMPT_MASK)]
    if NOT_ENDED in made.keys:
        found["no_eos_fraction"] = [_mean(group) for group in _groups(made, NOT_ENDED)]
    return found


def _of_groups(made: SequenceSample) -> dict[str, list[float]]:
    """`pass@k` and `majority@n`, if every prompt has the same number of responses, and more than one."""
    solved = [[score >= 1 for score in group] for group in _groups(made, SOLVED)]
    sizes = {len(group) for group in solved}
    n = sizes.pop() if len(sizes) == 1 else 1
    if n < 2:
        return {}
    samples, correct = torch.full((len(solved),), n), torch.tensor([sum(group) for group in solved])
    ks = [*(2**power for power in range(1, n.bit_length()) if 2**power < n), n]
    found = {f"pass@{k}": pass_at_k(samples, correct, k).tolist() for k in ks}
    if ANSWER_CLASSES in made.keys:
        votes = [majority([int(answer) for answer in group]) for group in _groups(made, ANSWER_CLASSES)]
        found[f"majority@{n}"] = [
            float(vote is not None and group[vote]) for vote, group in zip(votes, solved, strict=True)
        ]
    return found


def _groups(made: SequenceSample, key: str) -> list[list[float]]:
    """For each prompt, its responses' values under a key with one number per response."""
    return [[float(row) for one in group for row in one.tolist()] for group in _sequences(made, key)]


def _sequences(made: SequenceSample, key: str) -> Iterator[Sequence[torch.Tensor]]:
    pieces = iter(_tensor(made, key).cpu().split(made.flat_seqlens(key)))
    for group in made.seqlens[key]:
        yield [next(pieces) for _ in group]


def _tensor(made: SequenceSample, key: str) -> torch.Tensor:
    tensor = (made.data or {})[key]
    assert tensor is not None
    return tensor


def _false(mask: torch.Tensor) -> float:
    return float((~mask).sum())


def _mean(numbers: Iterable[float]) -> float:
    taken = list(numbers)
    return sum(taken) / len(taken) if taken else 0.0
