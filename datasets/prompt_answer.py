"""Prompts with one answer each, for supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._jsonl import Row, read_rows, text_field
from ._rendering import Tokens, encode_answers, encode_prompts, fit_answers, within_limit


@register_dataset("prompt_answer")
@dataclass(kw_only=True)
class PromptAnswer:
    """Rows of a prompt and an answer; the answer ends with the end-of-sequence token."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")

    util: DatasetUtility

    path: str
    """A .jsonl file, or a .json file with a list. A field `id`, if every row has one, names the rows."""

    prompt_key: str = "prompt"
    """Field that holds the prompt."""

    answer_key: str = "answer"
    """Field that holds the answer."""

    chat: bool | Literal["auto"] = "auto"
    """Put the prompt through the tokenizer's chat template; auto: if it has one."""

    system: str | None = None
    """System prompt."""

    max_length: int = 1024
    """Longest prompt and answer together, in tokens."""

    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = "error"
    """What to do with longer rows; truncate_left shortens the prompt, truncate_right the answer."""

    bad_rows: Literal["error", "skip"] = "error"
    """What to do with a malformed row."""

    max_bad_rows: int = 10
    """Skip no more malformed rows than this."""

    max_rows: int | None = None
    """Read only so many rows, from the start of the file."""

    _rows: list[tuple[Row[tuple[str, str]], tuple[Tokens, Tokens]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = read_rows(
            self.path,
            self._read,
            bad_rows=self.bad_rows,
            max_bad_rows=self.max_bad_rows,
            max_rows=self.max_rows,
        )
        prompts = encode_prompts(
            self.util.tokenizer, [row.content[0] for row in rows], chat=self.chat, system=self.system
        )
        answers = encode_answers(self.util.tokenizer, [row.content[1] for row in rows])
        self._rows = within_limit(
            rows,
            list(zip(prompts, answers, strict=True)),
            length=lambda pair: len(pair[0]) + len(pair[1]),
            fit=_fit,
            max_length=self.max_length,
            overlong=self.overlong,
        )

    @property
    def keys(self) -> tuple[str, ...]:
        return self.KEYS

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
