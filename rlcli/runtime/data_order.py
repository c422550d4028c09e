"""The rows of datasets: the order in which they are drawn, how many a step takes,
and reading them by number.

The order is a pure function of seed, epoch and number of rows, and needs no torch. A stream is read
forward once, and its rows are cached for a while in case they are requested again.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.api.config import stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.dataset import is_stream
from rlcli.errors import DataError

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe

CACHED_ROWS = 4096
"""Rows of a stream that stay in memory. An older one is read again, starting at its position."""
LOOKED_AT = 2048
"""Maximum number of rows that a dataset's digest reads, spread evenly over it."""
FIRST_OF_STREAM = 16
"""Rows of a stream that its digest reads: the first ones."""


def training_id(epoch: int, row: int) -> str:
    """The run's id of a training sample."""
    return f"e{epoch}r{row}"


def epoch_of(id_: str) -> int:
    """The epoch of a training sample; 0 for an evaluation sample."""
    return 0 if id_.startswith("eval-") else int(id_[1 : id_.index("r")])


def evaluation_id(row: int) -> str:
    return f"eval-r{row}"


def row_of(id_: str) -> tuple[bool, int]:
    """Whether a sample belongs to the evaluation, and its row."""
    return id_.startswith("eval-"), int(id_.rpartition("r")[2])


def dataset_of(recipe: Recipe, id_: str) -> str:
    """The dataset that contains the sample's row."""
    is_evaluation, _ = row_of(id_)
    return str(recipe.train.eval.dataset if is_evaluation else recipe.train.dataset)


def location_of_sample(recipe: Recipe, id_: str) -> str:
    """`row 17 of dataset train`, counted from 1, as lines are."""
    return f"row {row_of(id_)[1] + 1} of dataset {dataset_of(recipe, id_)}"


@dataclass
class DataOrder:
    """The order of a dataset over its epochs."""

    rows: int | None
    """Rows of a pass. None for a stream until one has ended:
    its first pass is assumed to be endless."""
    seed: int = 0
    shuffle: bool = True

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, row) of a position, counted from the beginning of the first epoch. A stream
        whose number of rows is unknown is in its first epoch."""
        if self.rows is None:
            return 0, position
        epoch, row = divmod(position, self.rows)
        if self.shuffle:
            row = int(_permutation(self.rows, stable_seed(self.seed, "order", epoch))[row])
        return epoch, row


@dataclass(frozen=True)
class StepSizes:
    """How many samples each step takes. A step that reaches the end of an epoch continues into the
    next."""

    rows: int | None
    """Rows of an epoch; None if unknown."""
    per_step: int
    first_step: int = 0
    """The step at which counting starts: above 0 in a resumed run."""
    first_position: int = 0
    """Samples taken by the steps before that one."""
    end: int | None = None
    """Total number of samples, so that the last step may be smaller; None if unlimited."""

    def position(self, step: int) -> int:
        """How many samples the steps before `step` take."""
        position = self.first_position + (step - self.first_step) * self.per_step
        return position if self.end is None else min(position, self.end)

    def size(self, step: int) -> int:
        return self.position(step + 1) - self.position(step)


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int) -> np.ndarray:
    """[rows], in the smallest dtype: there may be many millions."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    return order.astype(np.min_scalar_type(rows))


def digest_rows(dataset: Any, name: str = "train") -> str:
    """Digest that shows whether a dataset is the one that a run began with: its length and the
    content of its rows.

    A dataset with more than LOOKED_AT rows is sampled, unless it has a `digest()` of its own.
    `name` is its name in the recipe. Raises DataError for a row that is not usable.
    """
    if hasattr(dataset, "digest"):
        return str(dataset.digest())
    if is_stream(dataset):
        first = islice(dataset.rows_from(0, 0), FIRST_OF_STREAM)
        read = [_checked(row, name, number).as_json() for number, row in enumerate(first)]
        return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()
    rows = len(dataset)
    content = hashlib.sha256(str(rows).encode())
    for row in range(0, rows, -(-rows // LOOKED_AT) or 1):
        content.update(
            json.dumps(_checked(dataset[row], name, row).as_json(), sort_keys=True).encode()
        )
    return content.hexdigest()


def _checked(row: Any, dataset: str, number: int) -> SequenceSample:
    # not at the top: computing an order needs no torch
    from rlcli.api.output_checks import RowOrigin, checked_row

    return checked_row(row, RowOrigin(dataset, number))


class StreamRows:
    """The rows of a `Stream`, as read by the one rank that loads them."""

    def __init__(self, dataset: Any, name: str):
        self.length: int | None = None
        """Rows of a pass, once one has ended."""
        self._dataset = dataset
        self._name = name
        self._cache: OrderedDict[tuple[int, int], SequenceSample] = OrderedDict()
        self._rows: Iterator[SequenceSample] = iter(())
        self._next = (0, -1)
        """The (epoch, row) that the iterator returns next; initially no row."""
        self._began = 0
        """The row that the iterator began with."""

    def row(self, epoch: int, number: int) -> SequenceSample | None:
        """A row of a pass; None if the pass ends before it.
        Raises DataError if passes differ in length."""
        if self.length is not None and number >= self.length:
            return None
        if (epoch, number) not in self._cache and not self._read(epoch, number):
            return None
        return self._cache[epoch, number]

    def _read(self, epoch: int, number: int) -> bool:
        """Read forward up to a row; False if the pass ends before it."""
        if self._next[0] != epoch or not 0 <= self._next[1] <= number:
            self._rows = iter(self._dataset.rows_from(epoch, number))
            self._next, self._began = (epoch, number), number
        while self._next[1] <= number:
            row = next(self._rows, None)
            if row is None:
                self._end(*self._next)
                return False
            self._cache[self._next] = _checked(row, self._name, self._next[1])
            self._next = epoch, self._next[1] + 1
            if len(self._cache) > CACHED_ROWS:
                self._cache.popitem(last=False)
        return True

    def _end(self, epoch: int, rows: int) -> None:
        """A pass has ended where row number `rows` would be,
        or earlier if the first requested row did not exist."""
        self._next = epoch, -1
        if rows == self._began:
            rows = sum(1 for _ in self._dataset.rows_from(epoch, 0))
        if not rows:
            raise DataError(f"dataset {self._name} has no rows", code="F80")
        if self.length is not None and rows != self.length:
            message = (
                f"dataset {self._name} has {rows} rows in pass {epoch + 1}, and had "
                f"{self.length} in another"
            )
            raise DataError(
                message, hint="a stream gives the same number of rows in every pass", code="F31"
            )
        self.length = rows


def by_number(dataset: Any, name: str) -> Any:
    """The dataset in a form that `read_row` can read by row number."""
    return StreamRows(dataset, name) if is_stream(dataset) else dataset


def read_row(source: Any, name: str, id_: str, row: int) -> SequenceSample | None:
    """The row of a sample, if it is usable; None if a stream has ended before it."""
    if isinstance(source, StreamRows):
        return source.row(epoch_of(id_), row)
    return _checked(source[row], name, row)


def described_rows(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """The row counts of datasets, None for streams, and their digests."""
    rows = {
        name: None if is_stream(dataset) else len(dataset) for name, dataset in datasets.items()
    }
    digests = {name: digest_rows(dataset, name) for name, dataset in datasets.items()}
    return {"rows": rows, "digests": digests}
