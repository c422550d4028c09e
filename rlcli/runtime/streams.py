"""Rows of a stream by number: read forward once, and cached for a while in case they are requested again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.api.dataset import is_stream
from rlcli.errors import DataError
from rlcli.runtime.data_order import digest_rows, epoch_of
from rlcli.runtime.origin import RowOrigin
from rlcli.runtime.output_checks import checked_row

KEPT = 4096
"""Rows that stay in memory. An older one is read again, starting at its position."""


class StreamRows:
    """The rows of a `Stream`, as read by the one rank that loads them."""

    def __init__(self, dataset: Any, name: str):
        self.length: int | None = None
        """Rows of a pass, once one has ended."""
        self._dataset = dataset
        self._name = name
        self._kept: OrderedDict[tuple[int, int], SequenceSample] = OrderedDict()
        self._rows: Iterator[SequenceSample] = iter(())
        self._next = (0, -1)
        """The (epoch, row) that the iterator returns next; initially no row."""
        self._began = 0
        """The row that the iterator began with."""

    def row(self, epoch: int, number: int) -> SequenceSample | None:
        """A row of a pass; None if the pass ends before it. Raises DataError if passes differ in length."""
        if self.length is not None and number >= self.length:
            return None
        if (epoch, number) not in self._kept and not self._read(epoch, number):
            return None
        return self._kept[epoch, number]

    def _read(self, epoch: int, number: int) -> bool:
        """Read forward up to a row; False if the pass ends before it."""
        if self._next[0] != epoch or not 0 <= self._next[1] <= number:
            self._rows = iter(self._dataset.rows_from(epoch, number))
            self._next, self._began = (epoch, number), number
        while self._next[1] <= number:
            place = self._next
            row = next(self._rows, None)
            if row is None:
                self._end(*place)
                return False
            self._kept[place] = checked_row(row, RowOrigin(self._name, place[1]))
            self._next = epoch, place[1] + 1
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return True

    def _end(self, epoch: int, rows: int) -> None:
        """A pass has ended where row number `rows` would be, or earlier if the first requested row did not exist."""
        self._next = epoch, -1
        if rows == self._began:
            rows = sum(1 for _ in self._dataset.rows_from(epoch, 0))
        if not rows:
            raise DataError(f"dataset {self._name} has no rows", code="F80")
        if self.length is not None and rows != self.length:
            message = f"dataset {self._name} has {rows} rows in pass {epoch + 1}, and had {self.length} in another"
            raise DataError(message, hint="a stream gives the same number of rows in every pass", code="F31")
        self.length = rows


def by_number(dataset: Any, name: str) -> Any:
    """The dataset in a form that `read_row` can read by row number."""
    return StreamRows(dataset, name) if is_stream(dataset) else dataset


def read_row(source: Any, name: str, id_: str, row: int) -> SequenceSample | None:
    """The row of a sample, if it is usable; None if a stream has ended before it."""
    if isinstance(source, StreamRows):
        return source.row(epoch_of(id_), row)
    return checked_row(source[row], RowOrigin(name, row))


def described_rows(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """The row counts of datasets, None for streams, and their digests."""
    return {
        "rows": {name: None if is_stream(dataset) else len(dataset) for name, dataset in datasets.items()},
        "digests": {name: digest_rows(dataset, name) for name, dataset in datasets.items()},
    }
