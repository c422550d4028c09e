"""Sums that may span ranks.

Every statistic in `rlcli.ops` that must be the same on all data-parallel ranks takes an
`all_reduce`: a function that sums a tensor over the ranks. On a single rank it is `identity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

AllReduce = Callable[[torch.Tensor], torch.Tensor]

Sums = Mapping[str, tuple[torch.Tensor, "torch.Tensor | int"]]
"""Name → the sum of some numbers on this rank, and how many there are."""


def identity(value: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return value


def counted_means(sums: Sums, all_reduce: AllReduce) -> dict[str, float]:
    """The mean of each over all ranks, without those of which nothing was counted."""
    rows = [[float(total), float(count)] for total, count in sums.values()]
    reduced = all_reduce(torch.tensor(rows, dtype=torch.float64)).tolist()
    return {
        name: total / count for name, (total, count) in zip(sums, reduced, strict=True) if count
    }


def masked_moments(
    x: torch.Tensor, mask: torch.Tensor | None = None, all_reduce: AllReduce = identity
) -> tuple[float, float, float]:
    """(count, mean, biased variance) of the entries of `x` that `mask` keeps, over all ranks,
    in float64.

    The variance is a mean of squared deviations (two passes), so a large mean causes no
    cancellation. Entries that the mask leaves out are never read: they may be NaN or Inf. If
    nothing is kept, the result is (0, 0, 0).
    """
    counted = (x if mask is None else x[mask]).detach().to(torch.float64)
    total = all_reduce(torch.stack([torch.ones_like(counted).sum(), counted.sum()]))
    count = float(total[0])
    if count == 0:
        return 0.0, 0.0, 0.0
    mean = float(total[1]) / count
    squares = all_reduce((counted - mean).square().sum().reshape(1))
    return count, mean, float(squares[0]) / count
