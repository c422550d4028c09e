"""The order in which rows are drawn, and how many a step takes: pure functions of seed, epoch and number of rows."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.api.config import stable_seed
from rlcli.api.dataset import is_stream
from rlcli.runtime.origin import RowOrigin

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe


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
    dataset = recipe.train.eval.dataset if row_of(id_)[0] else recipe.train.dataset
    assert dataset is not None
    return dataset


def place_of_sample(recipe: Recipe, id_: str) -> str:
    """`row 17 of dataset train`."""
    return f"row {row_of(id_)[1]} of dataset {dataset_of(recipe, id_)}"


@dataclass(frozen=True)
class DataOrder:
    """The order of a dataset over its epochs."""

    rows: int
    seed: int
    shuffle: bool = True

    def at(self, place: int) -> tuple[int, int]:
        """(epoch, row) of a position, counted from the beginning of the first epoch."""
        epoch, within = divmod(place, self.rows)
        seed = stable_seed(self.seed, "order", epoch) if self.shuffle else None
        return epoch, _permutation(self.rows, seed)[within]


class StreamOrder:
    """The order of a dataset of unknown length: the dataset's own. Its first pass is assumed to be endless until it has
    ended."""

    def __init__(self, rows: int | None = None):
        self.rows = rows
        """Rows of a pass, once known."""

    def at(self, place: int) -> tuple[int, int]:
        """(epoch, row) of a position, as far as is known."""
        return (0, place) if self.rows is None else divmod(place, self.rows)


@dataclass(frozen=True)
class StepSizes:
    """How many samples each step takes. A step that reaches the end of an epoch continues into the next."""

    rows: int | None
    """Rows of an epoch; None if unknown."""
    per_step: int
    first_step: int = 0
    """The step at which counting starts: above 0 in a resumed run."""
    first_place: int = 0
    """Samples taken by the steps before that one."""
    end: int | None = None
    """Total number of samples, so that the last step may be smaller; None if unlimited."""

    def place(self, step: int) -> int:
        """How many samples the steps before `step` take."""
        place = self.first_place + (step - self.first_step) * self.per_step
        return place if self.end is None else min(place, self.end)

    def size(self, step: int) -> int:
        return self.place(step + 1) - self.place(step)


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int | None) -> tuple[int, ...]:
    if seed is None:
        return tuple(range(rows))
    return tuple(np.random.Generator(np.random.PCG64(seed)).permutation(rows).tolist())


LOOKED_AT = 2048
"""Maximum number of rows that a dataset's digest reads, spread evenly over it."""
FIRST_OF_STREAM = 16
"""Rows of a stream that its digest reads: the first ones."""


def digest_rows(dataset: Any, name: str = "train") -> str:
    """Digest that shows whether a dataset is the one that a run began with: its length and the content of its rows.

    A dataset with more than LOOKED_AT rows is sampled, unless it has a `digest()` of its own. `name` is its name in the
    recipe. Raises DataError for a row that is not usable.
    """
    from rlcli.runtime.output_checks import checked_row  # not at the top: computing an order needs no torch

    if hasattr(dataset, "digest"):
        return str(dataset.digest())
    if is_stream(dataset):
        first = islice(dataset.rows_from(0, 0), FIRST_OF_STREAM)
        read = [checked_row(row, RowOrigin(name, number)).as_json() for number, row in enumerate(first)]
        return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()
    rows = len(dataset)
    content = hashlib.sha256(str(rows).encode())
    for row in range(0, rows, -(-rows // LOOKED_AT) or 1):
        sample = checked_row(dataset[row], RowOrigin(name, row))
        content.update(json.dumps(sample.as_json(), sort_keys=True).encode())
    return content.hexdigest()
