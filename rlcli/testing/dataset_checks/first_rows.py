"""A stream as seen by the dataset checks: its first rows, by number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.api.dataset import IteratedRows, is_stream

LOOKED_AT = 64
"""Number of rows of a stream that are used."""


OF_NUMBERED_ROWS = ("preview", "survey")
"""What only a dataset that is no stream has, though its class defines it."""


class FirstRows:
    """The first rows of a stream; everything else is delegated to the dataset."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.rows: list[SequenceSample] = list(islice(stream.rows_from(0, 0), LOOKED_AT))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> SequenceSample:
        """Reads the stream again, as a resumed run would."""
        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        return next(iter(self.stream.rows_from(0, index)))

    def __getattr__(self, name: str) -> Any:
        if name in OF_NUMBERED_ROWS:
            raise AttributeError(f"a stream has no {name}")
        return getattr(self.stream, name)


def by_number(dataset: Any) -> Any:
    """A dataset whose rows can be indexed by number."""
    return FirstRows(dataset) if is_stream(dataset) else dataset


def reader(dataset: Any) -> Callable[..., Any]:
    """The method that returns its rows."""
    if not isinstance(dataset, FirstRows):
        return type(dataset).__getitem__
    if isinstance(dataset.stream, IteratedRows):
        return type(dataset.stream.dataset).__iter__
    return type(dataset.stream).rows_from
