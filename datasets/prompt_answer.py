"""Prompts with one answer each, for supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import BadRow, Row
from ._messages import Prompt, answered_field, prompt_field
from ._rendering import Overlong, Tokens, fit_answers
from ._samples import answered_sample
from ._text_rows import TextRows

Texts = tuple[Prompt, str]


@register_dataset("prompt_answer")
@dataclass(kw_only=True)
class PromptAnswer(TextRows):
    """Rows of a prompt and an answer; the answer ends with the end-of-sequence token."""

    ELSEWHERE: ClassVar[str] = "sft alpaca instruction prompt_completion"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "answer": "4"},
        {"prompt": "Translate into German: good morning", "answer": "Guten Morgen! Schönen Tag."},
        {"prompt": "Name two colours.\nOne on each line.", "answer": "red\nblue"},
    )
    SAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "answers": ["4"], "metadata": {}},
    )

    prompt_key: str = "prompt"
    """Field that holds the prompt: a text, or a list of messages."""

    context_key: str | None = None
    """Field with a text that the prompt is about, as in Alpaca's `input`: it follows the prompt
    after a blank line, unless it is empty or null."""

    answer_key: str = "answer"
    """Field that holds the answer: a text, or a list with a message of the assistant."""

    _rows: list[tuple[Row[Texts], tuple[Tokens, Tokens]]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Texts]]) -> list[tuple[Row[Texts], tuple[Tokens, Tokens]]]:
        prompts = self._encode_prompts([row.content[0] for row in rows])
        answers = self._encode_answers(rows, [row.content[1] for row in rows])
        return self._within_limit(
            rows,
            list(zip(prompts, answers, strict=True)),
            prompt=lambda row: row.content[0],
            length=lambda pair: len(pair[0]) + len(pair[1]),
            fit=_fit,
        )

    def __getitem__(self, index: int) -> SequenceSample:
        return answered_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, (prompt_tokens, answer_tokens) = self._rows[index]
        prompt, answer = row.content
        return Preview.answered(
            prompt_tokens, [answer_tokens], answers=[answer], **self._about(row, prompt)
        )

    def _read(self, fields: dict[str, Any]) -> Texts:
        prompt = prompt_field(fields, self.prompt_key)
        context = None if self.context_key is None else fields.get(self.context_key)
        if context is None:  # as tables write for no text
            context = ""
        if not isinstance(context, str) or (context and not isinstance(prompt, str)):
            raise BadRow(f"field {self.context_key!r} is not a text that could follow the prompt")
        if context.strip():
            prompt = f"{prompt}\n\n{context}"
        before, answer = answered_field(fields, self.answer_key)
        if before:
            raise BadRow(f"field {self.answer_key!r} has messages before the answer")
        return prompt, answer


def _fit(pair: tuple[Tokens, Tokens], limit: int, overlong: Overlong) -> tuple[Tokens, Tokens]:
    prompt, (answer,) = fit_answers(pair[0], [pair[1]], limit, overlong)
    return prompt, answer
