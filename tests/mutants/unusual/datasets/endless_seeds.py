"""A stream whose rows are drawn by the seed and the number of the pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._rendering import encode_prompts


@register_dataset("endless_seeds")
@dataclass(kw_only=True)
class EndlessSeeds:
    """Random sums, without a list of them."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    rows: int = 9
    """Rows of a pass."""

    def rows_from(self, epoch: int, start: int) -> Iterator[SequenceSample]:
        for number in range(start, self.rows):
            rng = Random(f"{self.util.seed}/{epoch}/{number}")
            tokens = encode_prompts(
                self.util.tokenizer, [f"{rng.randint(2, 9)} + {rng.randint(2, 9)} ="], chat=False
            )[0]
            yield SequenceSample.from_default(
                ids=[f"{epoch}:{number}"],
                seqlens=[len(tokens)],
                data={"packed_prompts": torch.tensor(tokens)},
            )
