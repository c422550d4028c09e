"""Prompts with preferred and rejected answers,
for reward models and direct preference optimisation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.config import stable_seed
from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits

from ._jsonl import BadRow, Row, numbers_field
from ._messages import Prompt
from ._preferences import PreferenceFields, in_list
from ._samples import paired_sample
from ._text_rows import Answered, TextRows

Pair = tuple[str, str, float]
"""A preferred and a rejected answer, and the margin between them."""
Texts = tuple[Prompt, list[Pair]]


@register_dataset("paired")
@dataclass(kw_only=True)
class Paired(TextRows):
    """Rows of a prompt with an equal number of positive and negative answers.

    A sample holds the sequences positive 0, negative 0, positive 1, negative 1, …, each starting
    with the prompt and ending with the end-of-sequence token. `prompt_mask` marks the tokens of the
    prompt, `prompt_lens` is their number.
    """

    ELSEWHERE: ClassVar[str] = "rw_pair packed_rw_pair preference pairwise dpo rm reward"
    KEYS: ClassVar[tuple[str, ...]] = (
        "packed_input_ids",
        "prompt_mask",
        "prompt_lens",
        "margins if margin_key",
    )
    PAIRS: ClassVar[str] = "max_pairs_per_prompt"
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "pos_answers": ["4"], "neg_answers": ["It is five."]},
        {
            "prompt": "Greet me.",
            "pos_answers": ["Hello!", "Good day, how are you?"],
            "neg_answers": ["No.", "Go!"],
        },
        {
            "prompt": "A colour?",
            "pos_answers": ["red", "blue", "grün"],
            "neg_answers": ["two", "dog", "no"],
        },
    )
    SAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "answers": ["4", "It is five."]},
        {"prompt": "Greet me.", "answers": ["Hello!", "No.", "Good day, how are you?", "Go!"]},
    )

    LIMITS: ClassVar[Limits] = {"max_pairs_per_prompt": {"ge": 1}}

    prompt_key: str | None = "prompt"
    """Field that holds the prompt: a text, or a list of messages. null: the prompt is what both
    answers begin with, up to a blank or, in conversations, up to the last message. Such texts are
    often transcripts with a format of their own; then set `chat: false`."""

    positive_key: str = "pos_answers"
    """Field that holds the list of preferred answers, or a single one: a text, or a conversation
    that ends with it."""

    negative_key: str = "neg_answers"
    """Field that holds the list of rejected answers, or a single one;
    the n-th belongs to the n-th preferred one."""

    margin_key: str | None = None
    """Field that holds a list of numbers: how much better the n-th preferred answer is than the
    n-th rejected one; required by a reward model's `use_margins`."""

    max_pairs_per_prompt: int = 2
    """Maximum number of pairs taken from one prompt, drawn with the run's seed."""

    _rows: list[tuple[Row[Texts], Answered]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Texts]]) -> list[tuple[Row[Texts], Answered]]:
        return self._answered(rows, [self._answers(row) for row in rows])

    def __getitem__(self, index: int) -> SequenceSample:
        margins = (
            [margin for *_, margin in self._pairs(self._rows[index][0])]
            if self.margin_key
            else None
        )
        return paired_sample(self.preview(index), margins)

    def preview(self, index: int) -> Preview:
        row, (prompt, answers) = self._rows[index]
        about = self._about(row, row.content[0])
        return Preview.answered(prompt, answers, answers=self._answers(row), **about)

    @property
    def _names(self) -> PreferenceFields:
        return PreferenceFields(
            self.prompt_key, self.positive_key, self.negative_key, self.util.column_setting
        )

    def _read(self, fields: dict[str, Any]) -> Texts:
        prompt, positive, negative = self._names.read(fields)
        if len(positive) != len(negative):
            raise BadRow(
                f"{len(positive)} {self.positive_key} but {len(negative)} {self.negative_key}"
            )
        margins = (
            numbers_field(in_list(fields, self.margin_key), self.margin_key)
            if self.margin_key
            else [0.0] * len(positive)
        )
        if len(margins) != len(positive):
            raise BadRow(
                f"{len(positive)} {self.positive_key} but {len(margins)} {self.margin_key}"
            )
        return prompt, list(zip(positive, negative, margins, strict=True))

    def _answers(self, row: Row[Texts]) -> list[str]:
        """Positive 0, negative 0, positive 1, … of the selected pairs."""
        return [
            answer for positive, negative, _ in self._pairs(row) for answer in (positive, negative)
        ]

    def _pairs(self, row: Row[Texts]) -> list[Pair]:
        """The selected pairs."""
        _, pairs = row.content
        if len(pairs) <= self.max_pairs_per_prompt:
            return pairs
        rng = random.Random(stable_seed("paired", self.util.seed, row.id))
        return [pairs[i] for i in sorted(rng.sample(range(len(pairs)), self.max_pairs_per_prompt))]
