"""Prompts only, for algorithms that generate the responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import Row
from ._messages import Prompt, prompt_field
from ._rendering import Tokens, fit_prompt
from ._samples import prompt_sample
from ._text_rows import TextRows


@register_dataset("prompt_only")
@dataclass(kw_only=True)
class PromptOnly(TextRows):
    """Rows with a prompt; the metadata hold its `messages` if the chat template wrote it."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?"},
        {"prompt": "Write a rhyme about Käse."},
        {"prompt": "Continue:\n1, 2, 3,"},
    )

    prompt_key: str = "prompt"
    """Field that holds the prompt: a text, or a list of messages."""

    _rows: list[tuple[Row[Prompt], Tokens]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Prompt]]) -> list[tuple[Row[Prompt], Tokens]]:
        encoded = self._encode_prompts([row.content for row in rows])
        return self._within_limit(
            rows, encoded, prompt=lambda row: row.content, length=len, fit=fit_prompt
        )

    def __getitem__(self, index: int) -> SequenceSample:
        return prompt_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, tokens = self._rows[index]
        prompt = row.content
        return Preview(
            sequences=[tokens], metadata=self._conversation(prompt), **self._about(row, prompt)
        )

    def _read(self, fields: dict[str, Any]) -> Prompt:
        return prompt_field(fields, self.prompt_key)
