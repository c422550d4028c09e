"""Prompts that a generator makes: only iteration is possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._rendering import encode_prompts


@register_dataset("from_a_generator")
@dataclass(kw_only=True)
class FromAGenerator:
    """Prompts that a generator makes: only iteration is possible."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    rows: int = 7
    """Rows of a pass."""

    def __iter__(self) -> Iterator[SequenceSample]:
        for number in range(self.rows):
            text = f"{number} + {number} ="
            (tokens,) = encode_prompts(self.util.tokenizer, [text], chat=False)
            yield SequenceSample.from_default(
                ids=[f"row {number}"],
                seqlens=[len(tokens)],
                data={"packed_prompts": torch.tensor(tokens)},
            )
