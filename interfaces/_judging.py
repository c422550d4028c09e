"""Shared by all judges, wherever their model runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface
from rlcli.api.limits import Limits

from ._judge_questions import TEMPLATE, Question, question_of
from ._scores import ScoreErrors, described_responses


@dataclass(kw_only=True)
class Judging(ScoreErrors, ModelInterface):
    """Asks a language model for a score of each response.

    The score is in the last line of the reply, after a mark that the judged text cannot know, so that a verdict inside
    a response has no effect. Any other reply has no score, which is an error of the judge and not a zero.
    """

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    LIMITS: ClassVar[Limits] = {"temperature": {"ge": 0}}

    template: str = TEMPLATE
    """The question; `{prompt}`, `{response}` and `{field}`, for any field of the row, stand for texts to judge or to
    judge by. Instructions on how to give the score are appended."""

    lowest: float = 0.0
    """The lowest score."""

    highest: float = 10.0
    """The highest score. The reward is the score as given."""

    temperature: float = 0.0
    """Sampling temperature of the judge; 0 is greedy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lowest < self.highest:
            raise ValueError(f"lowest ({self.lowest}) must be below highest ({self.highest})")
        if "{response}" not in self.template:
            raise ValueError("template must contain {response}")

    def questions(self, tokenizer: Any, data: SequenceSample, settings: Mapping[str, Any]) -> list[Question]:
        """One question for each response, equal for equal ones; `settings`: what else a reply depends on.

        Raises DataError where the template names a field that rows lack.
        """
        rows = described_responses(tokenizer, data)
        return [question_of(row, self.template, settings, self.lowest, self.highest) for row in rows]
