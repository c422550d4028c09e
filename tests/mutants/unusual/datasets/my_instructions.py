"""Instructions with an optional input, and the output to learn: Alpaca's rows and prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import BadRow, Row, text_field
from ._rendering import Overlong, Tokens, encode_answers, fit_answers
from ._samples import answered_sample
from ._text_rows import TextRows

Texts = tuple[str, str]
"""The prompt of a row, and its output."""


@register_dataset("my_instructions")
@dataclass(kw_only=True)
class MyInstructions(TextRows):
    """Rows of an instruction, an input and an output; the output ends with the end-of-sequence
    token, and only it is trained on."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"instruction": "Add the numbers.", "input": "2 and 2", "output": "4"},
        {"instruction": "Name two colours.", "input": "", "output": "red\nblue"},
        {"instruction": "Say good morning in German.", "output": "Guten Morgen! Schönen Tag."},
    )

    instruction_key: str = "instruction"
    """Field with the instruction."""

    input_key: str = "input"
    """Field with the text that the instruction is about; it may be empty or absent."""

    output_key: str = "output"
    """Field with the output."""

    _rows: list[tuple[Row[Texts], tuple[Tokens, Tokens]]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Texts]]) -> list[tuple[Row[Texts], tuple[Tokens, Tokens]]]:
        prompts = self._encode_prompts([row.content[0] for row in rows])
        outputs = encode_answers(self.util.tokenizer, [row.content[1] for row in rows])
        return self._within_limit(
            rows,
            list(zip(prompts, outputs, strict=True)),
            prompt=lambda row: row.content[0],
            length=lambda pair: len(pair[0]) + len(pair[1]),
            fit=_fit,
        )

    def __getitem__(self, index: int) -> SequenceSample:
        return answered_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        """The row in plain Python, so that `rlcli check` can inspect it without torch."""
        row, (prompt, output) = self._rows[index]
        text, answer = row.content
        return Preview.answered(prompt, [output], answers=[answer], **self._about(row, text))

    def _read(self, fields: dict[str, Any]) -> Texts:
        context = fields.get(self.input_key) or ""
        if not isinstance(context, str):
            raise BadRow(f"field {self.input_key!r} is not text")
        parts = [f"### Instruction:\n{text_field(fields, self.instruction_key)}"]
        if context.strip():
            parts.append(f"### Input:\n{context}")
        return "\n\n".join([*parts, "### Response:\n"]), text_field(fields, self.output_key)


def _fit(pair: tuple[Tokens, Tokens], limit: int, overlong: Overlong) -> tuple[Tokens, Tokens]:
    prompt, (output,) = fit_answers(pair[0], [pair[1]], limit, overlong)
    return prompt, output
