"""Rows whose prompt is a number or a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import BadRow, Row
from ._rendering import Tokens, fit_prompt
from ._samples import prompt_sample
from ._text_rows import TextRows


@register_dataset("numbers_as_prompts")
@dataclass(kw_only=True)
class NumbersAsPrompts(TextRows):
    """A number is asked for its double."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": 2},
        {"prompt": 17.5},
        {"prompt": "forty"},
    )

    _rows: list[tuple[Row[str], Tokens]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[str]]) -> list[tuple[Row[str], Tokens]]:
        encoded = self._encode_prompts([row.content for row in rows])
        return self._within_limit(
            rows, encoded, prompt=lambda row: row.content, length=len, fit=fit_prompt
        )

    def __getitem__(self, index: int) -> SequenceSample:
        return prompt_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, tokens = self._rows[index]
        return Preview(sequences=[tokens], **self._about(row, row.content))

    def _read(self, fields: dict[str, Any]) -> str:
        value = fields.get("prompt")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise BadRow("field 'prompt' is neither a number nor a text")
        if not str(value).strip():
            raise BadRow("field 'prompt' is empty")
        return f"Twice {value}?"
