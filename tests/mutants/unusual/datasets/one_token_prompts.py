"""Prompts of a single token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset


@register_dataset("one_token_prompts")
@dataclass(kw_only=True)
class OneTokenPrompts:
    """Prompts of a single token."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> SequenceSample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = self.util.tokenizer(str(index), add_special_tokens=False).input_ids[:1]
        return SequenceSample.from_default(
            ids=[index], seqlens=[1], data={"packed_prompts": torch.tensor(tokens)}
        )
