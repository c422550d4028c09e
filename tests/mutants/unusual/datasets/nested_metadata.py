"""Prompts whose metadata are lists, mappings and null."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._rendering import encode_prompts


@register_dataset("nested_metadata")
@dataclass(kw_only=True)
class NestedMetadata:
    """Rows for rewards that need more than an answer."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> SequenceSample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = encode_prompts(self.util.tokenizer, [f"{index} * 2 ="], chat=False)[0]
        return SequenceSample.from_default(
            ids=[index],
            seqlens=[len(tokens)],
            data={"packed_prompts": torch.tensor(tokens)},
            metadata={
                "tests": [[{"input": str(index), "output": str(2 * index)}]],
                "hint": [None if index % 2 else "double it"],
                "options": [{"a": [index, index + 1], "b": {}}],
            },
        )
