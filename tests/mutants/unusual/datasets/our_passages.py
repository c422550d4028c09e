"""Questions with passages to answer them from, for rewards that compare a response with the
answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits

from ._jsonl import Row, text_field, texts_field
from ._rendering import Tokens, fit_prompt
from ._samples import prompt_sample
from ._text_rows import TextRows

Task = tuple[list[str], str, str]
"""The passages, the question and its answer."""


@register_dataset("our_passages")
@dataclass(kw_only=True)
class Passages(TextRows):
    """Rows of a question, a list of passages, the best first, and an answer. The prompt has the
    numbered passages before the question; the metadata hold the `question` and the `answer`."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "question": "Who wrote the letter?",
            "passages": [
                "Ann wrote a letter.",
                "Bob read it.",
                "Ann wrote a letter.",
                "It rained.",
            ],
            "answer": "Ann",
        },
        {"question": "Where is Käthe?", "passages": ["Käthe is at home."], "answer": "at home"},
        {
            "question": "How many pens are there?",
            "passages": ["There are 2 red pens.", "There are 3 blue pens.", "One pen is lost."],
            "answer": "4",
        },
    )
    LIMITS: ClassVar[Limits] = {"max_passages": {"ge": 1}}

    question_key: str = "question"
    """Field with the question."""

    passages_key: str = "passages"
    """Field with the list of passages."""

    answer_key: str = "answer"
    """Field with the answer."""

    max_passages: int = 3
    """Most passages in a prompt: the first ones that differ."""

    _rows: list[tuple[Row[Task], Tokens]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Task]]) -> list[tuple[Row[Task], Tokens]]:
        prompts = [self._message(row) for row in rows]
        encoded = self._encode_prompts(prompts)
        return self._within_limit(rows, encoded, prompt=self._message, length=len, fit=fit_prompt)

    def __getitem__(self, index: int) -> SequenceSample:
        return prompt_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, tokens = self._rows[index]
        _, question, answer = row.content
        message = self._message(row)
        metadata = {"question": question, "answer": answer} | self._conversation(message)
        return Preview(sequences=[tokens], metadata=metadata, **self._about(row, message))

    def _message(self, row: Row[Task]) -> str:
        passages, question, _ = row.content
        listed = [f"[{number}] {passage}" for number, passage in enumerate(passages, start=1)]
        return "\n".join([*listed, "", question])

    def _read(self, fields: dict[str, Any]) -> Task:
        passages = [passage.strip() for passage in texts_field(fields, self.passages_key)]
        different = list(dict.fromkeys(passages))
        question, answer = (text_field(fields, key) for key in (self.question_key, self.answer_key))
        return different[: self.max_passages], question, answer
