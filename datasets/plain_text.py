"""Plain texts, every token of which is trained on: documents for continued pre-training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import Row, text_field
from ._rendering import Overlong, encode_answers, encode_prompts
from ._samples import answered_sample
from ._text_rows import FileRows
from ._turns import Masked


@register_dataset("plain_text")
@dataclass(kw_only=True)
class PlainText(FileRows):
    """Rows with one text, followed by the end-of-sequence token. No template is applied."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""
    PROMPT: ClassVar[str] = "{question}"
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"text": "Two and two are four."},
        {"text": "Ein Käse, zwei Käse.\nKein Käse."},
        {"text": "1, 2, 3, 4, 5"},
    )

    text_key: str = "text"
    """Field that holds the text."""

    _rows: list[tuple[Row[str], Masked]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[str]]) -> list[tuple[Row[str], Masked]]:
        (start,) = encode_prompts(self.util.tokenizer, [""], chat=False)
        texts = encode_answers(self.util.tokenizer, [row.content for row in rows])
        return self._within_limit(
            rows,
            [
                Masked([*start, *tokens], [False] * len(start) + [True] * len(tokens))
                for tokens in texts
            ],
            prompt=lambda row: "",
            length=lambda masked: len(masked.tokens),
            fit=_fit,
        )

    def __getitem__(self, index: int) -> SequenceSample:
        return answered_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, masked = self._rows[index]
        return Preview(
            id=row.id,
            where=row.where,
            sequences=[masked.tokens],
            trained=[masked.trained],
            prompt="",
            answers=[row.content],
            masked_by="texts without prompts",
        )

    def _read(self, fields: dict[str, Any]) -> str:
        return text_field(fields, self.text_key)


def _fit(masked: Masked, limit: int, overlong: Overlong) -> Masked:
    span = slice(-limit, None) if overlong == "truncate_left" else slice(limit)
    return Masked(masked.tokens[span], masked.trained[span])
