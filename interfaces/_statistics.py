"""Means over the ranks of a role."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlcli.api.model import Model
from rlcli.ops.reduce import AllReduce, identity

Sums = Mapping[str, tuple[torch.Tensor, "torch.Tensor | int"]]
"""Name → the sum of some numbers on this rank, and how many there are."""


def reduce_over(model: Model) -> AllReduce:
    """Sums over the ranks of a role; a role without an engine has only one."""
    engine = model.module
    if engine is None:
        return identity
    return lambda value: engine.all_reduce(value.to(engine.device), "sum").to(value.device)


def means(sums: Sums, all_reduce: AllReduce) -> dict[str, float]:
    """The mean of each over all ranks; 0 where nothing was counted."""
    return dict.fromkeys(sums, 0.0) | counted_means(sums, all_reduce)


def counted_means(sums: Sums, all_reduce: AllReduce) -> dict[str, float]:
    """The mean of each over all ranks, without those of which nothing was counted."""
    rows = [[float(total), float(count)] for total, count in sums.values()]
    reduced = all_reduce(torch.tensor(rows, dtype=torch.float64)).tolist()
    return {
        name: total / count for name, (total, count) in zip(sums, reduced, strict=True) if count
    }
