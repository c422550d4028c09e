"""Mathematical questions with a known final answer, for rewards that check it.
Reads GSM8K unchanged."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import BadRow, Row, is_number, text_field
from ._messages import Prompt, prompt_field, text_of
from ._rendering import Tokens, fit_prompt
from ._samples import prompt_sample
from ._text_rows import TextRows

Problem = tuple[Prompt, str]
"""A question and its final answer."""


@register_dataset("math_prompts")
@dataclass(kw_only=True)
class MathPrompts(TextRows):
    """Rows of a question and an answer; the metadata hold the `question`, only the final `answer`,
    and the `messages` of the prompt if the chat template wrote it."""

    ELSEWHERE: ClassVar[str] = "gsm8k math aime math_code_prompt"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"question": "What is 6*7?", "answer": "6*7=42\n#### 42"},
        {"question": "Ann has 1000 pens and buys 234. How many now?", "answer": "#### 1,234"},
        {"question": "What is 1/2 of x² in LaTeX?", "answer": "\\frac{x^2}{2}"},
        {"question": "How much is half of 5?", "answer": 2.5},
    )
    SAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "prompt": "What is 6*7?",
            "answers": [],
            "metadata": {"question": "What is 6*7?", "answer": "42"},
        },
        {
            "prompt": "Ann has 1000 pens and buys 234. How many now?",
            "metadata": {"answer": "1234"},
        },
    )

    question_key: str = "question"
    """Field that holds the question: a text, or a list of messages."""

    answer_key: str = "answer"
    """Field that holds the answer: a number or a text. If a text contains `####`, the part after
    the last one is the final answer."""

    template: str = "{question}"
    """The user's message; `{question}` stands for the question."""

    _rows: list[tuple[Row[Problem], Tokens]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise ValueError(f"template is {self.template!r}; it must contain {{question}}")
        super().__post_init__()

    def _encoded(self, rows: list[Row[Problem]]) -> list[tuple[Row[Problem], Tokens]]:
        encoded = self._encode_prompts([self._message(row) for row in rows])
        return self._within_limit(rows, encoded, prompt=self._message, length=len, fit=fit_prompt)

    def __getitem__(self, index: int) -> SequenceSample:
        return prompt_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, tokens = self._rows[index]
        question, answer = row.content
        message = self._message(row)
        about = {"answer": answer, "question": text_of(question)}
        metadata = about | self._conversation(message)
        return Preview(sequences=[tokens], metadata=metadata, **self._about(row, message))

    def _message(self, row: Row[Problem]) -> Prompt:
        """The user's message, after the messages before it."""
        question = row.content[0]
        text = self.template.replace("{question}", text_of(question))
        return (
            text
            if isinstance(question, str)
            else [*question[:-1], question[-1] | {"content": text}]
        )

    def _read(self, fields: dict[str, Any]) -> Problem:
        question, answer = prompt_field(fields, self.question_key), fields.get(self.answer_key)
        if is_number(answer):
            return question, str(answer)
        if isinstance(answer, float):
            raise BadRow(f"field {self.answer_key!r} is {answer}, not a finite number or text")
        return question, final_answer(text_field(fields, self.answer_key))


def final_answer(text: str) -> str:
    """`… #### 1,234` → `1234`; a text without `####` is the final answer itself."""
    answer = text.rpartition("####")[2].strip()
    if not answer:
        raise BadRow("nothing follows the last ####")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer) if "####" in text else answer
