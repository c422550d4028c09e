"""The stats that loss functions report, summed over micro-batches and ranks,
and divided by a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Stats = Mapping[str, "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]
"""Numbers that a loss reports: a sum (divided by the loss weight) or a pair (sum, count)
with its own count."""

Reduce = Callable[[torch.Tensor, str], torch.Tensor]
"""(tensor, "sum" or "max") → the same on all ranks of the role."""

_MAX_STATS = 63
_NAME_BYTES = 64


def read_loss(returned: torch.Tensor | tuple[torch.Tensor, Stats]) -> tuple[torch.Tensor, Stats]:
    """The loss and its stats, including the loss itself, from what a loss function returned."""
    loss, stats = returned if isinstance(returned, tuple) else (returned, {})
    return loss, {"loss": loss.detach(), **stats}


def reduce_stats(
    collected: Sequence[Stats], weight: torch.Tensor, reduce: Reduce
) -> dict[str, float]:
    """Sum over micro-batches and ranks, then divide each stat by its own count, or by the loss
    weight (a scalar, this rank's).

    All ranks return the same, including ranks without a micro-batch: they must agree on whether to
    update. Raises ValueError for more than 63 stats, or a name of more than 64 bytes.
    """
    own_count = _agree_on_names(collected, reduce)
    slots = {name: slot for slot, name in enumerate(own_count)}
    table = torch.zeros((len(slots) + 1, 2), dtype=torch.float64)
    table[-1, 0] = weight
    for sums in collected:
        for name, value in sums.items():
            total, count = value if isinstance(value, tuple) else (value, None)
            table[slots[name], 0] += as_scalar(total)
            if count is not None:
                table[slots[name], 1] += as_scalar(count)
    table = reduce(table, "sum").cpu()
    counts = {
        name: table[slot, 1] if own_count[name] else table[-1, 0] for name, slot in slots.items()
    }
    return {
        name: float(table[slot, 0] / counts[name]) if counts[name] else 0.0
        for name, slot in slots.items()
    }


def _agree_on_names(collected: Sequence[Stats], reduce: Reduce) -> dict[str, bool]:
    """Name of each stat → whether it has its own count, the same on all ranks.

    The loss function determines the names, but a rank without a micro-batch has not run it, and
    gets them here.
    """
    has_count = {
        name: isinstance(value, tuple) for sums in collected for name, value in sums.items()
    }
    if len(has_count) > _MAX_STATS or any(len(name.encode()) > _NAME_BYTES for name in has_count):
        raise ValueError(
            f"a loss may report {_MAX_STATS} stats with names of {_NAME_BYTES} bytes, "
            f"not {sorted(has_count)}"
        )
    table = torch.zeros((_MAX_STATS, 1 + _NAME_BYTES), dtype=torch.int64)
    for row, name in zip(table, sorted(has_count), strict=False):
        encoded = name.encode()
        row[0] = 1 + has_count[name]
        row[1 : 1 + len(encoded)] = torch.tensor(list(encoded))
    rows = reduce(table, "max").cpu().tolist()
    return {bytes(byte for byte in row[1:] if byte).decode(): row[0] == 2 for row in rows if row[0]}


def as_scalar(value: torch.Tensor | float) -> torch.Tensor:
    """A number on the host, in float64, without its gradient."""
    return torch.as_tensor(value).detach().to("cpu", torch.float64)
