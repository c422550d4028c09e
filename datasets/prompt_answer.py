"""Prompts with one answer each, for supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rlcli.api.data import SequenceSample, register_dataset

from ._jsonl import Row, text_field
from ._rendering import Tokens, encode_answers, fit_answers, within_limit
from ._text_rows import TextRows


@register_dataset("prompt_answer")
@dataclass(kw_only=True)
class PromptAnswer(TextRows):
    """Rows of a prompt and an answer; the answer ends with the end-of-sequence token."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")

    prompt_key: str = "prompt"
    """Field that holds the prompt."""

    answer_key: str = "answer"
    """Field that holds the answer."""

    _rows: list[tuple[Row[tuple[str, str]], tuple[Tokens, Tokens]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = self._read_rows(self._read)
        prompts = self._encode_prompts([row.content[0] for row in rows])
        answers = encode_answers(self.util.tokenizer, [row.content[1] for row in rows])
        self._rows = within_limit(
            rows,
            list(zip(prompts, answers, strict=True)),
            length=lambda pair: len(pair[0]) + len(pair[1]),
            fit=_fit,
            max_length=self.max_length,
            overlong=self.overlong,
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> SequenceSample:
        row, (prompt, answer) = self._rows[index]
        tokens = torch.tensor([*prompt, *answer])
        return SequenceSample.from_default(
            ids=[row.id],
            seqlens=[len(tokens)],
            data={"packed_input_ids": tokens, "prompt_mask": torch.arange(len(tokens)) < len(prompt)},
        )

    def _read(self, fields: dict[str, Any]) -> tuple[str, str]:
        return text_field(fields, self.prompt_key), text_field(fields, self.answer_key)


def _fit(pair: tuple[Tokens, Tokens], limit: int, overlong: str) -> tuple[Tokens, Tokens]:
    prompt, (answer,) = fit_answers(pair[0], [pair[1]], limit, overlong)
    return prompt, answer
