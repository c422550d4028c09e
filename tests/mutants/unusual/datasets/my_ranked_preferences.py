"""Prompts with several scored responses, as pairs of a better and a worse one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.config import stable_seed
from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits

from ._jsonl import BadRow, Row, numbers_field, text_field, texts_field
from ._samples import paired_sample
from ._text_rows import Answered, TextRows

Texts = tuple[str, list[tuple[str, float]]]
"""A prompt, and its responses with their scores."""


@register_dataset("my_ranked_preferences")
@dataclass(kw_only=True)
class MyRankedPreferences(TextRows):
    """Rows of a prompt, a list of responses and a list of their scores. A sample holds better 0,
    worse 0, better 1, worse 1, …; responses with the same score make no pair."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "prompt_lens")
    PAIRS: ClassVar[str] = "max_pairs"
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "responses": ["five", "4", "no"], "scores": [1, 9, 1]},
        {"prompt": "Greet me.", "responses": ["Hello!", "Go!"], "scores": [0.9, 0.1]},
        {"prompt": "A colour?", "responses": ["grün", "red", "dog", "7"], "scores": [3, 3, 2, 1]},
    )
    LIMITS: ClassVar[Limits] = {"max_pairs": {"ge": 1}}

    prompt_key: str = "prompt"
    """Field with the prompt."""

    responses_key: str = "responses"
    """Field with the list of responses."""

    scores_key: str = "scores"
    """Field with the score of each response; higher is better."""

    max_pairs: int = 2
    """Maximum number of pairs taken from one prompt, drawn with the run's seed."""

    _rows: list[tuple[Row[Texts], Answered]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Texts]]) -> list[tuple[Row[Texts], Answered]]:
        return self._answered(rows, [self._answers(row) for row in rows])

    def __getitem__(self, index: int) -> SequenceSample:
        return paired_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        """The row in plain Python, so that `rlcli check` can inspect it without torch."""
        row, (prompt, answers) = self._rows[index]
        about = self._about(row, row.content[0])
        return Preview.answered(prompt, answers, answers=self._answers(row), **about)

    def _read(self, fields: dict[str, Any]) -> Texts:
        responses = texts_field(fields, self.responses_key)
        scores = numbers_field(fields, self.scores_key)
        if len(responses) != len(scores):
            raise BadRow(f"{len(responses)} {self.responses_key} but {len(scores)} scores")
        if len(set(scores)) < 2:
            raise BadRow("no response is better than another")
        return text_field(fields, self.prompt_key), list(zip(responses, scores, strict=True))

    def _answers(self, row: Row[Texts]) -> list[str]:
        """Better 0, worse 0, better 1, … of the drawn pairs."""
        return [answer for pair in self._pairs(row) for answer in pair]

    def _pairs(self, row: Row[Texts]) -> list[tuple[str, str]]:
        """The drawn pairs."""
        scored = row.content[1]
        pairs = [(one, other) for one, high in scored for other, low in scored if high > low]
        if len(pairs) <= self.max_pairs:
            return pairs
        rng = random.Random(stable_seed("my_ranked_preferences", self.util.seed, row.id))
        return [pairs[place] for place in sorted(rng.sample(range(len(pairs)), self.max_pairs))]
