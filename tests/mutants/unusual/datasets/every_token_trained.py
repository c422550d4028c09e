"""Documents of which every token is trained on: nothing is a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset


@register_dataset("every_token_trained")
@dataclass(kw_only=True)
class EveryTokenTrained:
    """Documents of which every token is trained on: nothing is a prompt."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")

    util: DatasetUtility

    documents: int = 6
    """Number of documents."""

    def __len__(self) -> int:
        return self.documents

    def __getitem__(self, index: int) -> SequenceSample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        text = " ".join(str(number) for number in range(index, index + 6))
        tokens = [*self.util.tokenizer(text, add_special_tokens=False).input_ids]
        tokens.append(self.util.tokenizer.eos_token_id)
        return SequenceSample.from_default(
            ids=[index],
            seqlens=[len(tokens)],
            data={
                "packed_input_ids": torch.tensor(tokens),
                "prompt_mask": torch.zeros(len(tokens), dtype=torch.bool),
            },
        )
