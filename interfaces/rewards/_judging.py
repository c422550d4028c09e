"""Shared by all judges, wherever their model runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface
from rlcli.api.limits import Limits
from rlcli.api.metrics import Metrics
from rlcli.errors import WorkerError, escape_control

from ._judge_questions import TEMPLATE, JudgeQuestion, question_of
from ._scores import Score, ScoreErrors, described_responses, places_of, shares

log = logging.getLogger(__name__)

UNSCORED = "reward_unscored"
"""Metric: share of the responses that the judge gives no score, although it scores others."""
CONTROL = "I do not know."
"""A response that any judge can score."""


@dataclass(frozen=True)
class Questions:
    """The questions about the responses of a batch."""

    of_responses: list[JudgeQuestion]
    """One for each response, equal for equal ones."""
    control: JudgeQuestion | None
    """The question about a response that any judge can score: it shows whose fault a missing score
    is. None for an empty batch."""


@dataclass(kw_only=True)
class Judging(ScoreErrors, ModelInterface):
    """Asks a language model for a score of each response.

    The score is in the last line of the reply, after a mark that the judged text cannot predict, so
    that a verdict inside a response has no effect. A response that the judge cannot score is
    rewarded with `unscored_reward`, which is not an error; a judge that cannot score a plain
    response either is one.
    """

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    METRICS: ClassVar[Metrics] = {
        "reward_unscored": (
            "share",
            "share of responses that the judge gives no score, although it scores others",
        ),
    }
    LIMITS: ClassVar[Limits] = {"temperature": {"ge": 0}}

    template: str = TEMPLATE
    """The question; `{prompt}`, `{response}` and `{field}`, for any field of the row, are replaced
    by their texts. Instructions on how to give the score are appended."""

    lowest: float = 0.0
    """The lowest score."""

    highest: float = 10.0
    """The highest score. The score itself is the reward."""

    unscored_reward: float | None = None
    """Reward of a response that the judge gives no score, although it scores others;
    null: `lowest`."""

    temperature: float = 0.0
    """Sampling temperature of the judge; 0 is greedy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lowest < self.highest:
            raise ValueError(f"lowest ({self.lowest}) must be below highest ({self.highest})")
        if "{response}" not in self.template:
            raise ValueError("template must contain {response}")

    def questions(
        self, tokenizer: Any, data: SequenceSample, settings: Mapping[str, Any]
    ) -> Questions:
        """The questions about the responses; `settings`: what else a reply depends on.

        Raises DataError where the template names a field that rows lack.
        """
        rows = described_responses(tokenizer, data)
        rows += [row | {"response": CONTROL} for row in rows[:1]]
        questions = [
            question_of(row, self.template, settings, self.lowest, self.highest) for row in rows
        ]
        return Questions(questions[:-1], questions[-1]) if questions else Questions([], None)

    def unscored(self, why: str) -> Score:
        """The score of a response that has none."""
        return Score(
            self.lowest if self.unscored_reward is None else self.unscored_reward, unscored=why
        )

    def judged(self, data: SequenceSample, scores: Sequence[Score | None]) -> SequenceSample:
        """`rewarded`, with each sample's share of UNSCORED.
        Raises the first error if there are too many."""
        rewarded = self.rewarded(data, scores)
        without = [score.unscored if score is not None else "" for score in scores]
        if any(without):
            sample, why = next(
                (sample, why) for sample, why in zip(places_of(data), without, strict=True) if why
            )
            words = "the judge gave %d of %d responses no score; first, %s: %s"
            log.warning(words, sum(map(bool, without)), len(without), sample, escape_control(why))
        rewarded.metadata[UNSCORED] = shares(data, [bool(why) for why in without])
        return rewarded


def as_error(score: Score) -> Score:
    """The fault of the judge, not of the response, if it was not scored."""
    if not score.unscored:
        return score
    return replace(
        score,
        error=WorkerError(f"no score from the judge: {score.unscored}", code="F52"),
        unscored="",
    )
