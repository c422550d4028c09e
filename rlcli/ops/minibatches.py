"""Which samples of a step share an optimizer step: the same on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["assign_minibatches"]


def assign_minibatches(
    batch_index: Sequence[int], n_minibatches: int, seed: int | str, epoch: int = 0
) -> list[list[int]]:
    """For each of `n_minibatches`, the indices into `batch_index` of the samples that belong to it,
    in order.

    `batch_index` holds the positions in the step's global batch of the samples that this rank has.
    Positions are grouped into strata of `n_minibatches` neighbours; a stratum is shuffled by (seed,
    epoch, stratum) and assigns one sample to each minibatch. So the assignment of a sample depends
    only on its position, the sizes of minibatches differ by at most one, and neighbours (which tend
    to be similar) are spread out. A rank's part may be empty.
    """
    if n_minibatches < 1:
        raise ValueError(f"n_minibatches is {n_minibatches}; it must be at least 1")
    minibatches: list[list[int]] = [[] for _ in range(n_minibatches)]
    for index in sorted(range(len(batch_index)), key=batch_index.__getitem__):
        stratum, position = divmod(batch_index[index], n_minibatches)
        deal = random.Random(f"{seed}/{epoch}/{stratum}").sample(
            range(n_minibatches), n_minibatches
        )
        minibatches[deal[position]].append(index)
    return minibatches
