"""Prompts alone, for algorithms that let the model answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._jsonl import Row, read_rows, text_field
from ._rendering import Tokens, encode_prompts, fit_prompt, within_limit


@register_dataset("prompt_only")
@dataclass(kw_only=True)
class PromptOnly:
    """Rows of a prompt."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    path: str
    """A .jsonl file, or a .json file with a list. A field `id`, if every row has one, names the rows."""

    prompt_key: str = "prompt"
    """Field that holds the prompt."""

    chat: bool | Literal["auto"] = "auto"
    """Put the prompt through the tokenizer's chat template; auto: if it has one."""

    system: str | None = None
    """System prompt."""

    max_length: int = 1024
    """Longest prompt, in tokens."""

    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = "error"
    """What to do with longer prompts; truncate_left keeps their end, truncate_right their start."""

    bad_rows: Literal["error", "skip"] = "error"
    """What to do with a malformed row."""

    max_bad_rows: int = 10
    """Skip no more malformed rows than this."""

    max_rows: int | None = None
    """Read only so many rows, from the start of the file."""

    _rows: list[tuple[Row[str], Tokens]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = read_rows(
            self.path,
            self._read,
            bad_rows=self.bad_rows,
            max_bad_rows=self.max_bad_rows,
            max_rows=self.max_rows,
        )
        prompts = encode_prompts(self.util.tokenizer, [row.content for row in rows], chat=self.chat, system=self.system)
        self._rows = within_limit(
            rows, prompts, length=len, fit=fit_prompt, max_length=self.max_length, overlong=self.overlong
        )

    @property
    def keys(self) -> tuple[str, ...]:
        return self.KEYS

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> SequenceSample:
        row, prompt = self._rows[index]
        return SequenceSample.from_default(
            ids=[row.id], seqlens=[len(prompt)], data={"packed_prompts": torch.tensor(prompt)}
        )

    def _read(self, fields: dict[str, Any]) -> str:
        return text_field(fields, self.prompt_key)
