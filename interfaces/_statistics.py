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
    return {
        name: total / max(count, 1.0) for name, (total, count) in _reduced(sums, all_reduce).items()
    }


def counted_means(sums: Sums, all_reduce: AllReduce) -> dict[str, float]:
    """The mean of each over all ranks, without those of which nothing was counted."""
    return {
        name: total / count for name, (total, count) in _reduced(sums, all_reduce).items() if count
    }


def _reduced(sums: Sums, all_reduce: AllReduce) -> dict[str, tuple[float, float]]:
    totals = torch.stack([total.detach().to("cpu", torch.float64) for total, _ in sums.values()])
    counts = torch.tensor([int(count) for _, count in sums.values()], dtype=torch.float64)
    table = all_reduce(torch.stack([totals, counts])).tolist()
    return dict(zip(sums, zip(*table, strict=True), strict=True))
