"""What a dataset is built with, and what it must offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcli.api.config import DatasetAbstraction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DatasetUtility:
    """What every dataset is built with, beside the recipe's `args`: its first field, `util`.

    `len(dataset)` counts rows, `dataset[row]` is a batch of one sample. A run takes rows by number, so that it can
    shuffle them and be resumed: a dataset that reads a stream reads it into a list.

    What its class says in literals is read without importing it: KEYS, what every sample holds (`margins if by`: where
    that argument is set), or KEYS_OF, the argument that names a dataset, or several, whose keys it has; EXAMPLES, rows
    as its file may hold them, on which `rlcli test dataset` tries it; LONGEST, the tokens of its longest row, if no
    argument sets them; PAIRS, the argument that says how many pairs of sequences a row has, if it has pairs;
    NEEDS_TEMPLATE, that its rows are conversations, which only a chat template can write; TRIED_ON, `args` and
    `datasets` on which `rlcli test dataset` tries it if it is made of other datasets.

    A run builds every dataset as rank 0 of 1 and deals the rows out itself.
    """

    seed: int
    dp_rank: int
    world_size: int
    tokenizer: PreTrainedTokenizerBase
    datasets: Mapping[str, DatasetAbstraction] = field(default_factory=dict)
    """All datasets of the recipe, for those that are made of others."""

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.world_size:
            raise ValueError(f"dp_rank is {self.dp_rank}; it must lie between 0 and {self.world_size - 1}")
