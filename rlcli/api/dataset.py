"""What a dataset is built with, and what it must offer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from rlcli.api.config import DatasetAbstraction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlcli.api.data import SequenceSample


class Stream(Protocol):
    """A dataset without `__len__`: its rows are read forward, in its own order, and end when they end."""

    def rows_from(self, epoch: int, start: int) -> Iterator[SequenceSample]:
        """The rows of a pass over the data from number `start` on, each a batch of one sample; none if there are fewer.

        Every pass has the same number of rows. Their order may differ, but is a function of the seed and `epoch`: a run
        that is resumed continues with the row that would have been next.
        """


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is a `Stream`. One that may be either says so by an attribute of that name."""
    return bool(getattr(dataset, "is_stream", not hasattr(dataset, "__len__") and hasattr(dataset, "rows_from")))


class IteratedRows:
    """The `Stream` of a dataset that can be iterated and no more, such as torch's `IterableDataset`.

    To begin later in a pass, the rows before are read and left out. A dataset with `set_epoch`, as those of Hugging
    Face's library, is given the number of the pass.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def rows_from(self, epoch: int, start: int) -> Iterator[SequenceSample]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return islice(iter(self.dataset), start, None)


def with_rows(dataset: Any) -> Any:
    """The dataset, if its rows can be had by number or as a `Stream`; as `IteratedRows` if it can only be iterated."""
    numbered = getattr(type(dataset), "__getitem__", None)
    is_torchs = (getattr(numbered, "__module__", None) or "").startswith("torch.utils.data.")  # which raises
    by_number = numbered is not None and not is_torchs
    iterates = hasattr(type(dataset), "__iter__")
    return IteratedRows(dataset) if iterates and not by_number and not hasattr(dataset, "rows_from") else dataset


@dataclass(frozen=True)
class DatasetUtility:
    """What every dataset is built with, beside the recipe's `args`: its first field, `util`.

    `len(dataset)` counts rows, `dataset[row]` is a batch of one sample. A run takes rows by number, so that it can
    shuffle them and be resumed. A dataset that does not know how many rows it has is a `Stream` instead; one that can
    only be iterated becomes a `Stream`.

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
