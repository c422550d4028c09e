"""A loss on held-out batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.engine import LossFn
from rlcli.api.micro_batches import Cut
from rlcli.api.model import Model


def mean_loss(
    model: Model,
    batches: Sequence[SequenceSample],
    loss_fn: LossFn,
    loss_weight_fn: Callable[[SequenceSample], torch.Tensor],
    cut: Cut = "sample",
) -> tuple[dict[str, float], float]:
    """Loss and stats over all batches and ranks, and their weight. Stats must be sums that the loss
    weight divides, so that the split into batches does not matter."""
    totals: dict[str, float] = {"loss": 0.0}
    total_weight = 0.0
    for batch in batches:
        weight = total(model, loss_weight_fn(batch))
        stats = model.module.eval_batch(batch, loss_fn, loss_weight_fn, cut=cut)
        for name, value in stats.items():
            totals[name] = totals.get(name, 0.0) + value * weight
        total_weight += weight
    return {
        name: value / total_weight if total_weight else 0.0 for name, value in totals.items()
    }, total_weight


def total(model: Model, value: torch.Tensor) -> float:
    """The sum of a scalar over the data-parallel ranks."""
    return float(model.all_reduce(value.double()))
