"""Sequences of similar length as rectangles, in which kernels compute them together.

The rows of a pack, one sequence after another, fill the cells of the rectangles. Other cells are
padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

CALL = 2000
"""Pairs of queries and keys whose attention takes about as long as a call: with 9 heads of 64
columns, on a CPU."""


def rectangles(lengths: Sequence[int]) -> list[tuple[list[int], int]]:
    """Groups of sequences of similar length, as (sequence numbers, longest length); those without
    tokens are in none.

    A sequence is padded to the length of a similar one (`alike`) where that takes no longer than a
    call of its own.
    """
    groups: list[tuple[list[int], int]] = []
    for members, _ in alike(lengths):
        for number in members:
            length = lengths[number]
            if number == members[0] or groups[-1][1] ** 2 - length**2 > CALL:
                groups.append(([], length))
            groups[-1][0].append(number)
    return [group for group in groups if group[1]]


def alike(numbers: Sequence[int]) -> list[tuple[list[int], int]]:
    """Places of similar numbers, and the largest of each group; zeros are a group of their own.

    The largest number of a group is at most one and a half times the smallest, or 8.
    """
    order = sorted(range(len(numbers)), key=lambda i: -numbers[i])
    groups: list[tuple[list[int], int]] = []
    for i in order:
        largest = groups[-1][1] if groups else 0
        is_similar = numbers[i] * 1.5 >= largest or 0 < numbers[i] <= largest <= 8
        if groups and is_similar:
            groups[-1][0].append(i)
        else:
            groups.append(([i], numbers[i]))
    return groups


def rectangles_of(counts: Sequence[int], contexts: Sequence[int]) -> list[Rectangle]:
    """Rectangles of sequences that have `counts` queries and, before them, `contexts` keys."""
    groups = []
    for members, context in alike(contexts):
        for places, longest in rectangles([counts[i] for i in members]):
            numbers = [members[place] for place in places]
            of_each = tuple(contexts[i] for i in numbers)
            groups.append(Rectangle(numbers, longest, context, of_each))
    return groups


@dataclass(frozen=True)
class Rectangle:
    """Sequences that attend in one call. Their queries begin in the same column, as do the keys of
    the same tokens."""

    numbers: list[int]
    longest: int
    """Number of queries of the longest sequence."""
    context: int
    """Number of keys before the queries, in the sequence that has most of them."""
    contexts: tuple[int, ...]
    """Number of keys before the queries, in each sequence."""

    def positions_of_queries(self) -> torch.Tensor:
        """[N, longest]: the query in each cell, counted from the first one of its sequence."""
        return torch.arange(self.longest).expand(len(self.numbers), -1)

    def positions_of_keys(self) -> torch.Tensor:
        """[N, context + longest]: the key in each cell, counted from the first one of its sequence;
        negative in cells before that."""
        return torch.arange(-self.context, self.longest) + torch.tensor(self.contexts)[:, None]

    def seen(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """The keys that each query sees, bool: [n, keys], or [N, 1, n, keys] where contexts differ;
        None: itself and those before it."""
        if not self.context and window is None:
            return None
        columns = torch.arange(self.context + self.longest, device=device)
        last = torch.arange(self.context, self.context + self.longest, device=device)[:, None]
        seen = columns <= last
        if window is not None:
            seen &= columns > last - window
        if min(self.contexts) == self.context:
            return seen
        first = self.context - torch.tensor(self.contexts, device=device)
        return seen & (columns >= first[:, None])[:, None, None]


@dataclass(frozen=True)
class Cells:
    """How the n rows of a pack fill M cells, rectangle after rectangle."""

    shapes: list[tuple[int, int]]
    """Sequences and cells of each, in each rectangle."""
    rows: torch.Tensor
    """[M]: the row in each cell; row 0 in cells of padding."""
    filled: torch.Tensor
    """[M] bool: whether the cell is not padding."""
    places: torch.Tensor
    """[n]: the cell of each row."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        grids: Sequence[tuple[list[int], torch.Tensor]],
        device: torch.device,
    ) -> Cells:
        """For sequences of `lengths`. A grid is a rectangle: its sequences, and for each cell which
        position of its sequence is there, [N, columns]; a position that does not exist is
        padding."""
        starts = torch.tensor([0, *accumulate(lengths)])
        of_grids = [_rows_in(starts, *grid) for grid in grids]
        rows = torch.cat([rows for rows, _ in of_grids])
        filled = torch.cat([filled for _, filled in of_grids])
        cells = filled.nonzero()[:, 0]
        places = torch.empty(int(starts[-1]), dtype=torch.int64)
        places[rows[cells]] = cells
        shapes = [(len(numbers), positions.shape[1]) for numbers, positions in grids]
        return cls(shapes, rows.to(device), filled.to(device), places.to(device))

    def filled_with(self, states: torch.Tensor) -> torch.Tensor:
        """[M, H, D] from [1, H, n, D]."""
        return GatheredRows.apply(states[0].transpose(0, 1), self.rows, self.places, None)

    def taken_from(self, cells: torch.Tensor) -> torch.Tensor:
        """[n, H, D] from [M, H, D]."""
        return GatheredRows.apply(cells, self.places, self.rows, self.filled)

    def split(self, cells: torch.Tensor) -> Iterator[torch.Tensor]:
        """[sequences, H, cells of each, D] of each rectangle."""
        sizes = [sequences * columns for sequences, columns in self.shapes]
        for rectangle, shape in zip(cells.split(sizes), self.shapes, strict=True):
            yield rectangle.unflatten(0, shape).transpose(1, 2)


def _rows_in(
    starts: torch.Tensor, numbers: list[int], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For the cells of a grid, end to end: the row in each, and whether it is not padding. `starts`
    [N + 1]: the first row of each sequence of the pack, and the end of the last."""
    first, end = starts[numbers][:, None], starts[1:][numbers][:, None]
    rows = first + positions
    filled = (rows >= first) & (rows < end)
    return rows.masked_fill(~filled, 0).flatten(), filled.flatten()


class GatheredRows(torch.autograd.Function):
    """Rows of x [n, H, D] by index. Every row that matters is taken once,
    so the gradient is also a gather.

    (The gradient of `index_select` itself adds up rows one by one,
    which takes several times as long on a CPU.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        index: torch.Tensor,
        inverse: torch.Tensor,
        counted: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.inverse, ctx.counted = inverse, counted
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows = grad.index_select(0, ctx.inverse)
        if ctx.counted is not None:
            rows = rows.masked_fill(~ctx.counted[:, None, None], 0.0)
        return rows, None, None, None
