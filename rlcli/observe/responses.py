"""What is read out of responses: numbers for the metrics, and their aspects for people.

What an evaluation measures is a number per prompt. Ranks report its moments, which can be added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from rlcli.api.chat_template import shared_length
from rlcli.api.key_meaning import (
    ADVANTAGES,
    ANSWER_CLASSES,
    DENSE_REWARDS,
    FORKS,
    MEANINGS,
    NOT_ENDED,
    PROMPT_MASK,
    REWARDS,
    SAMPLED_LOGPROBS,
    SEQUENCES,
    SOLVED,
)
from rlcli.observe import token_details

if TYPE_CHECKING:
    import torch

    from rlcli.api.data import SequenceSample

Described = dict[str, dict[str, list[Any]]]
"""Sample → aspect of its responses → a value for each response."""


class Moments(NamedTuple):
    """What the mean of some numbers and its standard error require: two sums, and how many numbers
    there are. Those of several ranks can be added."""

    total: float = 0.0
    squares: float = 0.0
    """NaN if only the sum of the numbers is known."""
    size: int = 0

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Moments:
        return cls(sum(numbers), sum(number * number for number in numbers), len(numbers))

    @classmethod
    def of_sum(cls, total: float, size: int) -> Moments:
        """Those of numbers whose spread is not known."""
        return cls(total, math.nan, size)

    def __add__(self, added: Moments) -> Moments:  # type: ignore[override]
        return Moments(
            self.total + added.total, self.squares + added.squares, self.size + added.size
        )

    @property
    def mean(self) -> float:
        return self.total / self.size if self.size else math.nan

    @property
    def has_spread(self) -> bool:
        """Whether the numbers, one per prompt, were added up with their squares."""
        return not math.isnan(self.squares)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, from the spread of the numbers; NaN for fewer than two, and
        if it is not known."""
        if self.size < 2 or not self.has_spread:
            return math.nan
        spread = max(0.0, self.squares - self.total * self.mean) / (self.size - 1)
        return math.sqrt(spread / self.size)


def scores_of(
    output: SequenceSample, names: Mapping[str, str], *, evaluates: bool
) -> dict[str, list[float]]:
    """Scores in a call's outputs: in training one number per response, in an evaluation one per
    prompt. `names`: the interface's name for a key → key of the batch."""
    of_reward = tuple(names.values()) if REWARDS in names else ()
    if evaluates:
        return measures(output, of_reward)
    return {
        name: output.data[key].double().tolist() for name, key in _shown(output, of_reward).items()
    }


def _shown(output: SequenceSample, of_reward: Iterable[str]) -> dict[str, str]:
    """Name → key of the scores to report. `of_reward`: the output keys of a call that gives
    rewards, all of whose scores are reported."""
    unnamed = {
        key: key
        for key in of_reward
        if key not in MEANINGS and key in output.keys and _is_score(output, key)
    }
    return unnamed | {
        meaning.shown_as: key
        for key, meaning in MEANINGS.items()
        if meaning.shown_as and key in output.keys
    }


def _is_score(output: SequenceSample, key: str) -> bool:
    tensor, lengths = output.data[key], output.flat_seqlens(key)
    return (
        tensor is not None
        and tensor.dim() == 1
        and set(lengths) <= {1}
        and not tensor.dtype.is_complex
    )


def measures(output: SequenceSample, of_reward: Iterable[str] = ()) -> dict[str, list[float]]:
    """What an evaluation reports of a call's outputs: name → one number per prompt;
    `of_reward` as above.

    The means of scores over the responses to a prompt (`reward`, `accuracy`); with several
    responses to each prompt, `pass@k` for k = 2, 4, 8, … and for all n of them, and `majority@n`,
    whether the most frequent final answer is right; `response_length` in tokens; `no_eos_fraction`,
    the share that was cut off.
    """
    shown = _shown(output, of_reward)
    numbers = {name: _means(_groups(output, key)) for name, key in shown.items()}
    if SOLVED in output.keys:
        numbers |= _pass_rates(output)
    if PROMPT_MASK in output.keys:
        numbers["response_length"] = _means(_response_lengths(output))
    if NOT_ENDED in output.keys:
        numbers["no_eos_fraction"] = _means(_groups(output, NOT_ENDED))
    return numbers


def _pass_rates(output: SequenceSample) -> dict[str, list[float]]:
    """`pass@k` and `majority@n`, if every prompt has the same number of responses,
    and more than one."""
    import torch

    from rlcli.ops.evaluation import pass_at_k

    solved = [[score >= 1 for score in group] for group in _groups(output, SOLVED)]
    sizes = {len(group) for group in solved}
    n = sizes.pop() if len(sizes) == 1 else 1
    if n < 2:
        return {}
    samples, correct = torch.full((len(solved),), n), torch.tensor([sum(group) for group in solved])
    ks = [*(2**power for power in range(1, n.bit_length()) if 2**power < n), n]
    numbers = {f"pass@{k}": pass_at_k(samples, correct, k).tolist() for k in ks}
    if ANSWER_CLASSES in output.keys:
        answers = _groups(output, ANSWER_CLASSES)
        numbers[f"majority@{n}"] = [
            _is_vote_right(*group) for group in zip(answers, solved, strict=True)
        ]
    return numbers


def _is_vote_right(answers: Iterable[float], solved: Sequence[bool]) -> float:
    """Whether the most frequent answer to a prompt is right: 1 or 0."""
    from rlcli.ops.evaluation import majority

    vote = majority([int(answer) for answer in answers])
    return float(vote is not None and solved[vote])


def _groups(output: SequenceSample, key: str) -> list[list[float]]:
    """For each prompt, its responses' values under a key with one number per response."""
    numbers = iter(output.data[key].double().tolist())
    return [list(islice(numbers, sum(lengths))) for lengths in output.seqlens[key]]


def _response_lengths(output: SequenceSample) -> list[list[int]]:
    """For each prompt, the tokens of its responses."""
    tokens = iter(_lengths(output))
    return [list(islice(tokens, len(lengths))) for lengths in output.seqlens[PROMPT_MASK]]


def _means(groups: Iterable[Sequence[float]]) -> list[float]:
    """The mean of each group; 0 of an empty one."""
    return [sum(group) / len(group) if group else 0.0 for group in groups]


def describe_samples(samples: Iterable[SequenceSample], tokenizer: Any) -> Described:
    """All aspects of the responses of samples of batch size 1 for which a sample has the keys."""
    return {str(sample.ids[0]): _describe(sample, tokenizer) for sample in samples}


def _describe(sample: SequenceSample, tokenizer: Any) -> dict[str, list[Any]]:
    described = {name: aspect for name, aspect in ASPECTS.items() if aspect.keys <= sample.keys}
    return {name: aspect.values(sample, tokenizer) for name, aspect in described.items()}


def _response_masks(batch: SequenceSample) -> list[torch.Tensor]:
    """For each sequence, which of its tokens are the response's: [n] bool in host memory."""
    masks = batch.data[PROMPT_MASK].cpu().split(batch.flat_seqlens(PROMPT_MASK))
    return [~mask for mask in masks]


def _lengths(batch: SequenceSample) -> list[int]:
    """The tokens of each response."""
    return [int(mask.sum()) for mask in _response_masks(batch)]


def _texts(sample: SequenceSample, tokenizer: Any) -> list[dict[str, Any]]:
    answer = sample.metadata.get("answer", [None])[0]
    shown_answer = None if answer is None else str(answer)
    return [
        {"prompt": prompt, "response": response, "answer": shown_answer}
        for prompt, response in (_as_texts(runs, tokenizer) for runs in _runs_of(sample))
    ]


def _as_texts(runs: Sequence[TokenRun], tokenizer: Any) -> tuple[str, str]:
    """The prompt of a sequence, and what follows: the texts of turns, and between them, in angle
    brackets, what was observed."""
    prompt, *texts = [run.text(tokenizer) for run in runs]
    texts[1::2] = [f"⟨{observed}⟩" for observed in texts[1::2]]
    return prompt, "".join(texts)


class TokenRun(NamedTuple):
    """Tokens of a sequence: its prompt, a turn, or what was observed between two turns."""

    tokens: torch.Tensor
    repeated: int | None
    """None, unless another row begins with it: how many of its tokens the row before begins with
    too."""

    def text(self, tokenizer: Any) -> str:
        """Without what is repeated."""
        new = self.tokens[self.repeated or 0 :]
        return str(tokenizer.decode(new, skip_special_tokens=True))


def _runs_of(sample: SequenceSample) -> list[list[TokenRun]]:
    """The runs of each sequence, in the order of `_runs`."""
    sequences = sample.data[SEQUENCES].cpu().split(sample.flat_seqlens(SEQUENCES))
    repeated: Sequence[Mapping[int, int]] = [{}] * len(sequences)
    if FORKS in sample.keys:
        flags = sample.data[FORKS].cpu().split(sample.flat_seqlens(FORKS))
        repeated = [_repeated(*pair) for pair in zip(sequences, flags, strict=True)]
    columns = zip(sequences, _response_masks(sample), repeated, strict=True)
    return [_with_places(_runs(tokens, mask), at_place) for tokens, mask, at_place in columns]


def _with_places(runs: Sequence[torch.Tensor], repeated: Mapping[int, int]) -> list[TokenRun]:
    places = accumulate(map(len, runs), initial=0)
    return [TokenRun(run, repeated.get(place)) for run, place in zip(runs, places, strict=False)]


def _repeated(tokens: torch.Tensor, forks: torch.Tensor) -> dict[int, int]:
    """Where each row but the first begins → how many tokens it has in common with the row
    before."""
    begins = [0, *forks.nonzero()[:, 0].tolist()]
    return {
        begin: shared_length(tokens[before:begin].tolist(), tokens[begin:].tolist())
        for before, begin in pairwise(begins)
    }


def _runs(values: torch.Tensor, mask: torch.Tensor) -> Sequence[torch.Tensor]:
    """The values [n] of a sequence's tokens, cut into those of the prompt, of the first turn, of
    what was observed after it, of the second turn, and so forth. `mask`: [n], which of them are the
    response's."""
    lengths = [len(list(run)) for _, run in groupby(mask.tolist())]
    starts_sampled = bool(len(mask) and mask[0])
    return values.split([0, *lengths] if starts_sampled else lengths or [0])


def _turns(sample: SequenceSample, tokenizer: Any) -> list[list[dict[str, Any]] | None]:
    """For each sequence of several turns, its turns and what was observed between them; None for
    the others."""
    return [_parts_of(runs[1:], tokenizer) for runs in _runs_of(sample)]


def _parts_of(runs: Sequence[TokenRun], tokenizer: Any) -> list[dict[str, Any]] | None:
    if len(runs) < 2:
        return None
    return [_described(run, tokenizer, sampled=number % 2 == 0) for number, run in enumerate(runs)]


def _described(run: TokenRun, tokenizer: Any, sampled: bool) -> dict[str, Any]:
    turn = {"sampled": sampled, "text": run.text(tokenizer), "tokens": len(run.tokens)}
    return turn if run.repeated is None else turn | {"repeated": run.repeated}


def _turn_rewards(sample: SequenceSample, tokenizer: Any) -> list[list[float | None]]:
    """For each sequence, the reward of each turn: that of its last token; None if it is not
    finite."""
    rewards = sample.data[DENSE_REWARDS].cpu().double().split(sample.flat_seqlens(DENSE_REWARDS))
    return [
        _at_ends(_runs(of_tokens, mask)[1::2])
        for of_tokens, mask in zip(rewards, _response_masks(sample), strict=True)
    ]


def _at_ends(turns: Sequence[torch.Tensor]) -> list[float | None]:
    ends = [turn[-1].item() for turn in turns]
    return [number if math.isfinite(number) else None for number in ends]


def _of_responses(sample: SequenceSample, key: str) -> list[torch.Tensor]:
    """The values that a key with one for each token but the first has for the tokens of each
    response, in double precision."""
    values = sample.data[key].cpu().double().split(sample.flat_seqlens(key))
    return [
        of_tokens[mask[1:]] for of_tokens, mask in zip(values, _response_masks(sample), strict=True)
    ]


def _finishes(sample: SequenceSample, tokenizer: Any) -> list[str]:
    return ["length" if cut else "stop" for cut in sample.data[NOT_ENDED].tolist()]


def _logprobs(sample: SequenceSample, tokenizer: Any) -> list[float]:
    """The log-prob of each response: the sum over its tokens."""
    return [float(logprobs.sum()) for logprobs in _of_responses(sample, SAMPLED_LOGPROBS)]


def _advantages(sample: SequenceSample, tokenizer: Any) -> list[float | None]:
    """The advantage of each response: the mean over its tokens, None if it has none."""
    return [
        float(advantages.mean()) if len(advantages) else None
        for advantages in _of_responses(sample, ADVANTAGES)
    ]


class Aspect(NamedTuple):
    """Something to show of a sample's responses."""

    keys: set[str]
    """What it is read from."""
    values: Callable[[SequenceSample, Any], list[Any]]
    """(sample, tokenizer) → one value for each response."""


TEXT = "text"
ASPECTS: Mapping[str, Aspect] = {
    TEXT: Aspect({SEQUENCES, PROMPT_MASK}, _texts),
    "reward": Aspect({REWARDS}, lambda sample, _: sample.data[REWARDS].double().tolist()),
    "finish": Aspect({NOT_ENDED}, _finishes),
    "logprob": Aspect({SAMPLED_LOGPROBS, PROMPT_MASK}, _logprobs),
    "length": Aspect({PROMPT_MASK}, lambda sample, _: _lengths(sample)),
    "advantage": Aspect({ADVANTAGES, PROMPT_MASK}, _advantages),
    "turns": Aspect({SEQUENCES, PROMPT_MASK}, _turns),
    "turn_rewards": Aspect({DENSE_REWARDS, PROMPT_MASK}, _turn_rewards),
    "tokens": Aspect({SEQUENCES, PROMPT_MASK}, token_details.texts),
    "token_logprobs": Aspect(
        {SAMPLED_LOGPROBS, PROMPT_MASK},
        lambda sample, _: token_details.numbers(sample, SAMPLED_LOGPROBS),
    ),
    "token_advantages": Aspect(
        {ADVANTAGES, PROMPT_MASK}, lambda sample, _: token_details.numbers(sample, ADVANTAGES)
    ),
    "versions": Aspect({PROMPT_MASK}, lambda sample, _: token_details.versions(sample)),
}
"""What is shown of responses. Each aspect is described by the ranks that have its keys."""
