"""Sums that may span ranks.

Every statistic in `rlcli.ops` that must be the same on all data-parallel ranks takes an
`all_reduce`: a function that sums a tensor over the ranks. On a single rank it is `identity`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

AllReduce = Callable[[torch.Tensor], torch.Tensor]


def identity(value: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return value


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
