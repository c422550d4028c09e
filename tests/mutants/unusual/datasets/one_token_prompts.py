"""Prompts of a single character."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._rendering import encode_prompts


@register_dataset("one_token_prompts")
@dataclass(kw_only=True)
class OneTokenPrompts:
    """Prompts of a single character."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> SequenceSample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        (tokens,) = encode_prompts(self.util.tokenizer, [str(index)], chat=False)
        return SequenceSample.from_default(
            ids=[index], seqlens=[len(tokens)], data={"packed_prompts": torch.tensor(tokens)}
        )
