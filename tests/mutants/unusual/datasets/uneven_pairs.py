"""Preferences with one to three pairs for a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._rendering import encode_answers, encode_prompts


@register_dataset("uneven_pairs")
@dataclass(kw_only=True)
class UnevenPairs:
    """Preferences with one to three pairs for a prompt."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "prompt_lens")

    util: DatasetUtility

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> SequenceSample:
        if index not in range(len(self)):
            raise IndexError(index)
        tokenizer, pairs = self.util.tokenizer, index % 3 + 1
        (prompt,) = encode_prompts(tokenizer, [f"{index} + 1 ="], chat=False)
        answers = encode_answers(tokenizer, [str(index + 1), str(index + 2)] * pairs)
        rows = [[*prompt, *answer] for answer in answers]
        lengths = [len(row) for row in rows]
        tokens = [token for row in rows for token in row]
        masks = [torch.arange(length) < len(prompt) for length in lengths]
        return SequenceSample.from_default(
            ids=[index],
            seqlens={"packed_input_ids": [lengths], "prompt_mask": [lengths], "prompt_lens": [[1]]},
            data={
                "packed_input_ids": torch.tensor(tokens),
                "prompt_mask": torch.cat(masks),
                "prompt_lens": torch.tensor([len(prompt)]),
            },
        )
