"""The contract of datasets: how they are constructed, and what they must provide."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from rlcli.api.config import DatasetAbstraction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlcli.api.data import SequenceSample


class Stream(Protocol):
    """A dataset without `__len__`: its rows are read forward, in its own order,
    until there are no more."""

    def rows_from(self, epoch: int, start: int) -> Iterator[SequenceSample]:
        """The rows of a pass over the data from number `start` on, each a batch of one sample; none
        if there are fewer.

        Every pass has the same number of rows. Their order may differ, but must be a function of
        the seed and `epoch`, so that a resumed run continues with the row that would have been
        next.
        """


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is a `Stream`. One that may be either sets the attribute `is_stream`."""
    return bool(
        getattr(
            dataset, "is_stream", not hasattr(dataset, "__len__") and hasattr(dataset, "rows_from")
        )
    )


class IteratedRows:
    """A `Stream` over a dataset that can only be iterated, such as torch's `IterableDataset`.

    To start later in a pass, the rows before are read and skipped. If the dataset has `set_epoch`,
    as those of Hugging Face's library do, it is given the number of the pass.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def rows_from(self, epoch: int, start: int) -> Iterator[SequenceSample]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return islice(iter(self.dataset), start, None)


def with_rows(dataset: Any) -> Any:
    """The dataset, if its rows can be read by number or as a `Stream`; `IteratedRows` if it can
    only be iterated."""
    numbered = getattr(type(dataset), "__getitem__", None)
    # which raises
    is_torchs = (getattr(numbered, "__module__", None) or "").startswith("torch.utils.data.")
    by_number = numbered is not None and not is_torchs
    iterates = hasattr(type(dataset), "__iter__")
    return (
        IteratedRows(dataset)
        if iterates and not by_number and not hasattr(dataset, "rows_from")
        else dataset
    )


@dataclass(frozen=True)
class DatasetUtility:
    """What every dataset is built with in addition to the recipe's `args`: its first field, `util`.

    `len(dataset)` counts rows, `dataset[row]` is a batch of one sample. A run takes rows by number,
    so that it can shuffle them and be resumed. A dataset that does not know how many rows it has is
    a `Stream` instead; one that can only be iterated becomes a `Stream`.

    Its class may declare the following in literals, which are read without importing it: KEYS, the
    keys of every sample (`margins if by`: if that argument is set), or KEYS_OF, the argument that
    names one or more datasets whose keys it has; EXAMPLES, rows as its file may hold them, with
    which `rlcli test dataset` tests it; SAMPLES, the samples that these become with default
    arguments, each with its `prompt` and `answers` as texts without special tokens, its `metadata`
    and other keys, as far as they are stated; LONGEST, the tokens of its longest row, if no
    argument sets them; PROMPT, how it writes a question as a prompt (`{question}\\n`), if it has no
    arguments `template`, `system` and `chat` for that; PAIRS, the argument with the number of pairs
    of sequences in a row, or an empty text if a row is a single sequence; NEEDS_TEMPLATE, that its
    rows are conversations, which only a chat template can write; TRIED_ON, the `args` and
    `datasets` with which `rlcli test dataset` tests it if it is made of other datasets.

    A run builds every dataset as rank 0 of 1 and distributes the rows itself.
    """

    seed: int
    dp_rank: int
    world_size: int
    tokenizer: PreTrainedTokenizerBase
    datasets: Mapping[str, DatasetAbstraction] = field(default_factory=dict)
    """All datasets of the recipe, for datasets that combine others."""
    name: str = "train"
    """Its name in the recipe, for hints."""
    column_argument: str = "{field}_key"
    """The argument that names the column of a field, for hints."""

    def setting(self, argument: str, value: str) -> str:
        """An argument of the dataset, as it is set on the command line."""
        return f"datasets.{self.name}.args.{argument}={shlex.quote(value)}"

    def column_setting(self, field: str, column: str) -> str:
        """The column of a field, as it is set on the command line."""
        return self.setting(self.column_argument.format(field=field), column)

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.world_size:
            raise ValueError(
                f"dp_rank is {self.dp_rank}; it must be between 0 and {self.world_size - 1}"
            )
