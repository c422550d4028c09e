"""Scores of responses, some of which could not be computed: those are counted, reported and, if
there are too many, an error. None of them becomes an arbitrary number."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlcli.api.data import SequenceSample
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import ATTEMPT, PLACE, REASONS
from rlcli.api.limits import Limits
from rlcli.api.metrics import Metrics
from rlcli.errors import RlcliError, escape_control

from ._text import prompt_texts, response_texts

if TYPE_CHECKING:
    import torch

    from rlcli.api.model import Model

T = TypeVar("T")

log = logging.getLogger(__name__)

LIMITED, ERRORS = "reward_limits", "reward_errors"
"""Metrics: shares of the responses that hit a limit,
and of those whose score could not be computed."""


@dataclass(frozen=True)
class Score:
    """The score of one response."""

    value: float = 0.0
    limit: str = ""
    """The limit that the response hit, as the end of a sentence; `value` is then its score."""
    unscored: str = ""
    """Why a judge that scores other responses gives this one no score;
    `value` is then its score."""
    error: RlcliError | None = None
    """Why it could not be computed; not the response's fault."""

    @property
    def reason(self) -> str | None:
        """Why the response has this score, if that is out of the ordinary."""
        return self.limit or self.unscored or (self.error.what if self.error else None)


@dataclass(kw_only=True)
class ScoreErrors:
    """How to handle scores that could not be computed."""

    METRICS: ClassVar[Metrics] = {
        "reward_limits": (
            "share",
            "share of responses that hit a limit of the reward, mean over the prompts",
        ),
        "reward_errors": (
            "share",
            "share of responses whose score could not be computed, mean over the prompts",
        ),
    }
    LIMITS: ClassVar[Limits] = {"max_error_fraction": {"ge": 0, "le": 1}}

    error_reward: float = 0.0
    """Reward of a response whose score could not be computed, as long as there are few of these."""

    max_error_fraction: float = 0.01
    """Share of a call's responses (rounded up to whole ones) whose score may be missing; the run
    ends if there are more, or if no score at all could be computed."""

    def most_errors(self, responses: int) -> int:
        """The number of scores that may be missing."""
        return most_errors(self.max_error_fraction, responses)

    def rewarded(self, data: SequenceSample, results: Sequence[Score | None]) -> SequenceSample:
        """`rewards` [N], one per response; as metadata, for each sample the shares of LIMITED and
        ERRORS. A score is None if there were too many errors before it.

        Raises the first error if there are too many.
        """
        import torch

        places = places_of(data)
        self._check_errors(places, results)
        scores = [score for score in results if score is not None]
        limited = [number for number, score in enumerate(scores) if score.limit]
        if limited:
            words = "%d of %d responses hit a limit; first, %s: %s"
            log.warning(
                words,
                len(limited),
                len(scores),
                places[limited[0]],
                escape_control(scores[limited[0]].limit),
            )
        values = [self.error_reward if score.error else score.value for score in scores]
        are_limited = [bool(score.limit) for score in scores]
        are_faulty = [score.error is not None for score in scores]
        return one_each(
            data,
            {"rewards": torch.tensor(values, dtype=torch.float32)},
            {
                LIMITED: shares(data, are_limited),
                ERRORS: shares(data, are_faulty),
                REASONS: by_sample(data, [score.reason for score in scores]),
            },
        )

    def _check_errors(self, places: Sequence[str], scores: Sequence[Score | None]) -> None:
        failed = [
            (sample, score.error)
            for sample, score in zip(places, scores, strict=True)
            if score and score.error
        ]
        if not failed:
            return
        sample, error = failed[0]
        tried = sum(score is not None for score in scores)
        total = f"{tried} scores" + (" that were tried" if tried < len(scores) else "")
        message = f"{len(failed)} of {total} could not be computed; first, {sample}: {error.what}"
        if len(failed) > self.most_errors(len(scores)) or None in scores:
            raise type(error)(message, where=error.where, hint=error.hint, code=error.code)
        log.warning(
            "%s: %s\nTheir reward is %g.",
            error.where or "reward",
            escape_control(message),
            self.error_reward,
        )


@dataclass(kw_only=True)
class RightOrWrong(ModelInterface):
    """Rewards for responses that are either right or wrong."""

    correct_reward: float = 1.0
    """Reward of a correct response."""

    wrong_reward: float = 0.0
    """Reward of any other response."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.correct_reward > self.wrong_reward:
            raise ValueError(
                f"correct_reward ({self.correct_reward}) must be above wrong_reward "
                f"({self.wrong_reward})"
            )

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Mock: marks a random half of the responses as correct, whatever they say."""
        from rlcli.api.mocks import uniform

        if interface_type != "inference":
            return super().mock(interface_type, model, data)
        return self._marked(data, (uniform(model, data, ones(data), "solved") < 0.5).tolist())

    def _marked(self, data: SequenceSample, right: Sequence[bool]) -> SequenceSample:
        """The result of `inference` if it had found these responses right."""
        raise NotImplementedError


def most_errors(fraction: float, number: int) -> int:
    """How many results may be missing: a fraction of them, rounded up, but not all."""
    allowed = math.ceil(fraction * number)
    return allowed if allowed < number or fraction == 1 else number - 1


def places_of(data: SequenceSample) -> list[str]:
    """A label to find each response by: `sample q1, response 2 of 4`."""
    return [
        f"sample {id_}" + (f", response {number} of {len(group)}" if len(group) > 1 else "")
        for id_, group in zip(data.ids, data.seqlens["packed_input_ids"], strict=True)
        for number in range(1, len(group) + 1)
    ]


def rows_of(data: SequenceSample) -> list[dict[str, Any]]:
    """For each response the dataset's fields of its row, under the dataset's names."""
    names = [name for name in data.metadata if name not in (ATTEMPT, PLACE)]
    return [
        {name: data.metadata[name][sample] for name in names}
        for sample, group in enumerate(data.seqlens["packed_input_ids"])
        for _ in group
    ]


def described_responses(tokenizer: Any, data: SequenceSample) -> list[dict[str, Any]]:
    """For each response its row, plus the texts `prompt` and `response`."""
    texts = zip(prompt_texts(tokenizer, data), response_texts(tokenizer, data), strict=True)
    return [
        row | {"prompt": prompt, "response": response}
        for row, (prompt, response) in zip(rows_of(data), texts, strict=True)
    ]


def shares(data: SequenceSample, flags: Sequence[bool]) -> list[float]:
    """The share of each sample's responses that are flagged."""
    return [sum(group) / max(len(group), 1) for group in by_sample(data, flags)]


def by_sample(data: SequenceSample, values: Sequence[T]) -> list[list[T]]:
    """Values of responses, in a list for each sample."""
    rest = iter(values)
    return [[next(rest) for _ in group] for group in data.seqlens["packed_input_ids"]]


def one_each(
    data: SequenceSample, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, list[Any]]
) -> SequenceSample:
    """A batch with one number per response under each key."""
    return SequenceSample.from_default(
        ids=data.ids, seqlens=dict.fromkeys(tensors, ones(data)), data=tensors, metadata=metadata
    )


def ones(data: SequenceSample) -> list[list[int]]:
    """The lengths of a key with one number per response."""
    return [[1] * len(group) for group in data.seqlens["packed_input_ids"]]
