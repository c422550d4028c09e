"""Prompts alone, for algorithms that let the model answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rlcli.api.data import SequenceSample, register_dataset

from ._jsonl import Row, text_field
from ._rendering import Tokens, fit_prompt, within_limit
from ._text_rows import TextRows


@register_dataset("prompt_only")
@dataclass(kw_only=True)
class PromptOnly(TextRows):
    """Rows of a prompt."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    prompt_key: str = "prompt"
    """Field that holds the prompt."""

    _rows: list[tuple[Row[str], Tokens]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = self._read_rows(self._read)
        prompts = self._encode_prompts([row.content for row in rows])
        self._rows = within_limit(
            rows, prompts, length=len, fit=fit_prompt, max_length=self.max_length, overlong=self.overlong
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> SequenceSample:
        row, prompt = self._rows[index]
        return SequenceSample.from_default(
            ids=[row.id], seqlens=[len(prompt)], data={"packed_prompts": torch.tensor(prompt)}
        )

    def _read(self, fields: dict[str, Any]) -> str:
        return text_field(fields, self.prompt_key)
