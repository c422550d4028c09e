"""Which rows make up which step: a pure function of seed, epoch and the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlcli.api.config import stable_seed


@dataclass(frozen=True)
class DataOrder:
    """The order of a dataset over its epochs. A step that reaches the end of an epoch goes on into the next."""

    rows: int
    rows_per_step: int
    seed: int
    shuffle: bool = True

    def step(self, step: int) -> list[tuple[int, int]]:
        """(epoch, row) of every sample of a step (from 0), in the order of the step's batch."""
        start = step * self.rows_per_step
        return [
            (place // self.rows, self._epoch(place // self.rows)[place % self.rows])
            for place in range(start, start + self.rows_per_step)
        ]

    def _epoch(self, epoch: int) -> tuple[int, ...]:
        return _permutation(self.rows, stable_seed(self.seed, "order", epoch) if self.shuffle else None)


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int | None) -> tuple[int, ...]:
    if seed is None:
        return tuple(range(rows))
    return tuple(np.random.Generator(np.random.PCG64(seed)).permutation(rows).tolist())
