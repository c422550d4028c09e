"""A dataset with a single prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._rendering import encode_prompts


@register_dataset("one_row")
@dataclass(kw_only=True)
class OneRow:
    """A dataset with a single prompt."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> SequenceSample:
        if index:
            raise IndexError(index)
        tokens = encode_prompts(self.util.tokenizer, ["1 + 1 ="], chat=False)[0]
        return SequenceSample.from_default(
            ids=["the only one"],
            seqlens=[len(tokens)],
            data={"packed_prompts": torch.tensor(tokens)},
            metadata={"answer": ["2"]},
        )
