"""Two responses to a prompt and a label that says which of them is better, for DPO and reward
models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import BadRow, MissingField, Row, text_field
from ._samples import paired_sample
from ._text_rows import Answered, TextRows

Texts = tuple[str, list[str]]
"""A prompt, the better response and the worse one."""


@register_dataset("our_compared")
@dataclass(kw_only=True)
class Compared(TextRows):
    """Rows of a prompt with two responses, and the label `a` or `b` of the better one. A row with
    another label, such as a tie, is malformed: `bad_rows: skip` leaves it out."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "prompt_lens")
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "response_a": "4", "response_b": "Five, no?", "better": "a"},
        {
            "prompt": "Greet me.",
            "response_a": "Go away!",
            "response_b": "Grüß Gott.",
            "better": "b",
        },
        {"prompt": "A colour?", "response_a": "two\nor three", "response_b": "red", "better": "B"},
    )

    prompt_key: str = "prompt"
    """Field with the prompt."""

    first_key: str = "response_a"
    """Field with response `a`."""

    second_key: str = "response_b"
    """Field with response `b`."""

    label_key: str = "better"
    """Field that says which response is better: `a` or `b`."""

    _rows: list[tuple[Row[Texts], Answered]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Texts]]) -> list[tuple[Row[Texts], Answered]]:
        return self._answered(rows, [row.content[1] for row in rows])

    def __getitem__(self, index: int) -> SequenceSample:
        return paired_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, (prompt, answers) = self._rows[index]
        text, responses = row.content
        return Preview.answered(prompt, answers, answers=responses, **self._about(row, text))

    def _read(self, fields: dict[str, Any]) -> Texts:
        prompt, first, second = (
            text_field(fields, key) for key in (self.prompt_key, self.first_key, self.second_key)
        )
        if self.label_key not in fields:
            raise MissingField(self.label_key, fields)
        label = str(fields[self.label_key]).strip().lower()
        if label not in ("a", "b"):
            raise BadRow(f"field {self.label_key!r} is {label!r:.40}, neither a nor b")
        return prompt, [first, second] if label == "a" else [second, first]
