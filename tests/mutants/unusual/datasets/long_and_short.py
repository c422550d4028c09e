"""Documents of two lengths: one token, and as many as fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._rendering import encode_prompts


@register_dataset("long_and_short")
@dataclass(kw_only=True)
class LongAndShort:
    """Answers without a prompt but the start of the text, of very different lengths."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""

    util: DatasetUtility

    longest: int = 200
    """Numbers in the long documents."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> SequenceSample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        count = 1 if index % 2 else self.longest - index
        text = " ".join(["7"] * count)
        tokens = [
            *encode_prompts(self.util.tokenizer, [text], chat=False)[0],
            self.util.tokenizer.eos_token_id,
        ]
        return SequenceSample.from_default(
            ids=[index],
            seqlens=[len(tokens)],
            data={
                "packed_input_ids": torch.tensor(tokens),
                "prompt_mask": torch.arange(len(tokens)) == 0,
            },
        )
