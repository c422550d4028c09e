"""Multiple-choice questions as prompts, for rewards that compare the letter of the answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.config import stable_seed
from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import BadRow, Row, text_field, texts_field
from ._rendering import Tokens, fit_prompt
from ._samples import prompt_sample
from ._text_rows import TextRows

LETTERS = "ABCDEFGHIJ"
Question = tuple[str, list[str], int]
"""A question, its choices, and which of them is right."""


@register_dataset("my_multiple_choice")
@dataclass(kw_only=True)
class MyMultipleChoice(TextRows):
    """Rows of a question, its choices, and the letter or place (from 0) of the right one, as in the
    row. The metadata hold the `answer`, the letter of the right choice in the prompt."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"question": "What is 2+2?", "choices": ["3", "4", "5"], "answer": 1},
        {"question": "Which is a colour?", "choices": ["grün", "two", "dog", "no"], "answer": "A"},
        {"question": "Is 7 even?", "choices": ["yes", "no"], "answer": "B"},
    )

    question_key: str = "question"
    """Field with the question."""

    choices_key: str = "choices"
    """Field with the list of choices."""

    answer_key: str = "answer"
    """Field with the letter of the right choice, or its place in the list, from 0."""

    shuffle: bool = True
    """Show the choices in an order that is drawn with the run's seed, so that no letter is right
    more often than others."""

    _rows: list[tuple[Row[Question], Tokens]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Question]]) -> list[tuple[Row[Question], Tokens]]:
        encoded = self._encode_prompts([self._asked(row)[0] for row in rows])
        return self._within_limit(
            rows, encoded, prompt=lambda row: self._asked(row)[0], length=len, fit=fit_prompt
        )

    def __getitem__(self, index: int) -> SequenceSample:
        return prompt_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        """The row in plain Python, so that `rlcli check` can inspect it without torch."""
        row, tokens = self._rows[index]
        prompt, letter = self._asked(row)
        metadata = {"answer": letter} | self._conversation(prompt)
        return Preview(sequences=[tokens], metadata=metadata, **self._about(row, prompt))

    def _asked(self, row: Row[Question]) -> tuple[str, str]:
        """The prompt of a row, and the letter of the right choice in it."""
        question, choices, right = row.content
        order = list(range(len(choices)))
        if self.shuffle:
            seed = stable_seed("my_multiple_choice", self.util.seed, row.id)
            random.Random(seed).shuffle(order)
        lines = [f"{LETTERS[n]}. {choices[place]}" for n, place in enumerate(order)]
        prompt = "\n".join([question, *lines, "Answer with a letter.\n"])
        return prompt, LETTERS[order.index(right)]

    def _read(self, fields: dict[str, Any]) -> Question:
        choices, answer = texts_field(fields, self.choices_key), fields.get(self.answer_key)
        if not 2 <= len(choices) <= len(LETTERS):
            raise BadRow(f"{len(choices)} choices; there must be 2 to {len(LETTERS)}")
        letters = LETTERS[: len(choices)]
        if isinstance(answer, str) and len(answer) == 1 and answer in letters:
            answer = letters.index(answer)
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise BadRow(f"field {self.answer_key!r} is none of {', '.join(letters)}")
        return text_field(fields, self.question_key), choices, answer
