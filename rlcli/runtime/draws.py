"""What is drawn from the data, and what is drawn again. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rlcli.runtime.data_order import DataOrder, training_id


class Draw(NamedTuple):
    """A row of an epoch, drawn to become a sample."""

    epoch: int
    row: int
    attempt: int = 0
    """How many times it was begun before."""

    @property
    def id(self) -> str:
        """Id of the sample that it becomes."""
        return training_id(self.epoch, self.row)

    @property
    def again(self) -> Draw:
        """The next attempt."""
        return self._replace(attempt=self.attempt + 1)


class SampleQueue:
    """What is drawn next: first the samples that were given back, then the data in order."""

    def __init__(self, order: DataOrder, position: int = 0, returned: Iterable[Draw] = ()):
        self.position = position
        """Position in the data order of the first row that was never drawn."""
        self._order = order
        self._returned = deque(returned)

    @property
    def returned(self) -> tuple[Draw, ...]:
        """Samples that come before the rows that were never drawn."""
        return tuple(self._returned)

    def take(self, count: int) -> list[Draw]:
        old = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
        new = [Draw(*self._order.at(self.position + number)) for number in range(count - len(old))]
        self.position += len(new)
        return old + new

    @property
    def pass_rows(self) -> int | None:
        """Rows of a pass over the data, if known."""
        return self._order.rows

    def pass_ended(self, rows: int) -> None:
        """Record how many rows a pass over a stream has."""
        self._order.rows = rows

    def instead_of(self, draw: Draw) -> Draw:
        """The row to draw instead of one that turned out to be missing in the first pass over a
        stream."""
        return Draw(*self._order.at(draw.row), draw.attempt)

    def put_back(self, draws: Sequence[Draw]) -> None:
        """Return them to the front, in order, as if they had not been taken."""
        self._returned.extendleft(reversed(draws))

    def give_back(self, draws: Sequence[Draw]) -> None:
        """Return them to the front, in order, to be started again."""
        self.put_back([draw.again for draw in draws])
