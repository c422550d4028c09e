"""Questions with choices, from the files of several collections, as prompts to answer with a
letter."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, ClassVar

from rlcli.api.config import stable_seed
from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits

from ._jsonl import BadRow, MissingField, Row, text_field, texts_field
from ._rendering import Tokens, fit_prompt
from ._samples import prompt_sample
from ._text_rows import TextRows

CHOICES = ("choices", "options")
CATEGORY = ("category", "subject")


@dataclass(frozen=True)
class Trivia:
    """What a row holds."""

    question: str
    right: str
    choices: list[str]
    """All of them, the right one included, in the order of the row."""
    category: str


@register_dataset("their_trivia")
@dataclass(kw_only=True)
class TheirTrivia(TextRows):
    """Rows with a `question` and its choices: either `choices` (or `options`) with an `answer`,
    which is one of their texts or its number from 0, or a `correct_answer` with
    `incorrect_answers`, whose order is then the right one first.

    The prompt lists the choices under the letters from A on; the metadata hold the letter of the
    right one as `answer`, its text as `answer_text`, and the `category` of the row (or `subject`;
    `general` where it has neither).
    """

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "question": "Which planet is the largest?",
            "choices": ["Mars", "Jupiter", "Venus", "Saturn", "Mercury"],
            "answer": 1,
            "subject": "astronomy",
        },
        {
            "question": "Which is a cheese?",
            "options": ["Käse", "Brot"],
            "answer": "Käse",
        },
        {
            "question": "Who wrote Hamlet?",
            "correct_answer": "Shakespeare",
            "incorrect_answers": ["Goethe", "Molière", "Dante"],
            "category": "books",
        },
    )
    LIMITS: ClassVar[Limits] = {"max_choices": {"ge": 2, "le": 26}}

    shuffled: bool = True
    """List the choices in an order drawn from the run's seed; false: in that of the row."""

    max_choices: int = 4
    """List at most this many choices: the right one, and others drawn from the run's seed."""

    instruction: str = "Answer with one letter."
    """Last line of the prompt."""

    _rows: list[tuple[Row[Trivia], Tokens]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Trivia]]) -> list[tuple[Row[Trivia], Tokens]]:
        encoded = self._encode_prompts([self._message(row) for row in rows])
        return self._within_limit(rows, encoded, prompt=self._message, length=len, fit=fit_prompt)

    def __getitem__(self, index: int) -> SequenceSample:
        return prompt_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, tokens = self._rows[index]
        message, content = self._message(row), row.content
        about = {
            "answer": ascii_uppercase[self._listed(row).index(content.right)],
            "answer_text": content.right,
            "category": content.category,
        }
        metadata = about | self._conversation(message)
        return Preview(sequences=[tokens], metadata=metadata, **self._about(row, message))

    def _message(self, row: Row[Trivia]) -> str:
        listed = [
            f"{letter}) {choice}"
            for letter, choice in zip(ascii_uppercase, self._listed(row), strict=False)
        ]
        return "\n".join([row.content.question, *listed, f"{self.instruction}\n"])

    def _listed(self, row: Row[Trivia]) -> list[str]:
        """The choices that the prompt lists, in its order."""
        content = row.content
        rng = random.Random(stable_seed("their_trivia", self.util.seed, row.id))
        wrong = [choice for choice in content.choices if choice != content.right]
        if len(wrong) >= self.max_choices:
            wrong = rng.sample(wrong, self.max_choices - 1)
        listed = [choice for choice in content.choices if choice in (content.right, *wrong)]
        if self.shuffled:
            rng.shuffle(listed)
        return listed

    def _read(self, fields: dict[str, Any]) -> Trivia:
        choices, right = _choices(fields)
        if len(choices) < 2 or len(set(choices)) < len(choices):
            raise BadRow("a question needs two choices or more, which are not equal")
        category = next((fields[name] for name in CATEGORY if fields.get(name)), "general")
        return Trivia(text_field(fields, "question"), right, choices, str(category))


def _choices(fields: dict[str, Any]) -> tuple[list[str], str]:
    """The choices of a row, in its order, and the right one. Raises BadRow."""
    if "correct_answer" in fields:
        right = text_field(fields, "correct_answer")
        return [right, *texts_field(fields, "incorrect_answers")], right
    key = next((name for name in CHOICES if name in fields), None)
    if key is None:
        raise MissingField(CHOICES[0], fields)
    choices, answer = texts_field(fields, key), fields.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < len(choices):
            raise BadRow(f"answer is {answer}, but there are {len(choices)} {key}, from 0 on")
        return choices, choices[answer]
    right = text_field(fields, "answer")
    if right not in choices:
        raise BadRow(f"the answer is not one of the {key}")
    return choices, right
