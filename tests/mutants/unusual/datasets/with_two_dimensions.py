"""Documents with a key of two dimensions: features of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._rendering import encode_prompts


@register_dataset("with_two_dimensions")
@dataclass(kw_only=True)
class WithTwoDimensions:
    """Documents with a key of two dimensions: features of each token."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "features")

    util: DatasetUtility

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> SequenceSample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        prompt = encode_prompts(self.util.tokenizer, [f"{index} + 1 ="], chat=False)[0]
        tokens = [*prompt, self.util.tokenizer.eos_token_id]
        features = torch.arange(3 * len(tokens), dtype=torch.float32).view(-1, 3) + index
        return SequenceSample.from_default(
            ids=[index],
            seqlens={key: [[len(tokens)]] for key in self.KEYS},
            data={
                "packed_input_ids": torch.tensor(tokens),
                "prompt_mask": torch.arange(len(tokens)) < len(prompt),
                "features": features,
            },
        )
