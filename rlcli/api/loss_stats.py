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
_LOSS_WEIGHT, _OWN_COUNT = 1, 2
"""What a stat is divided by, as ranks tell each other; 0 is no stat."""


def read_loss(returned: torch.Tensor | tuple[torch.Tensor, Stats]) -> tuple[torch.Tensor, Stats]:
    """The loss and its stats, including the loss itself, from what a loss function returned."""
    loss, stats = returned if isinstance(returned, tuple) else (returned, {})
    return loss, {"loss": loss.detach(), **stats}


def reduce_stats(
    collected: Sequence[Stats], weight: torch.Tensor, reduce: Reduce
) -> dict[str, float]:
    """Sum over micro-batches and ranks, then divide each stat by its own count, or by the loss
    weight (a scalar, this rank's). A mean over nothing, whose own count is 0 on all ranks, is left
    out.

    All ranks return the same, including ranks without a micro-batch: they must agree on whether to
    update. Raises ValueError for more than 63 stats, a name of more than 64 bytes, and for names
    that differ between ranks.
    """
    own_count = _agree_on_names(collected, reduce)
    slots = {name: slot for slot, name in enumerate(own_count)}
    table = torch.zeros((len(slots) + 1, 2), dtype=torch.float64)
    table[-1, 0] = weight
    _add_up(collected, slots, table)
    table = reduce(table, "sum").cpu()
    means = {}
    for name, slot in slots.items():
        total, count = table[slot]
        if own_count[name] and not count:
            continue
        divisor = count if own_count[name] else table[-1, 0]
        means[name] = float(total / divisor) if divisor else 0.0
    return means


def _add_up(collected: Sequence[Stats], slots: Mapping[str, int], table: torch.Tensor) -> None:
    """Add each stat to its slot of `table` [slots, 2]: totals, and counts if they have some."""
    cells: list[tuple[int, int]] = []
    numbers: list[torch.Tensor | float] = []
    for sums in collected:
        for name, value in sums.items():
            parts = value if isinstance(value, tuple) else (value,)
            cells += [(slots[name], column) for column in range(len(parts))]
            numbers += parts
    for cell, number in zip(cells, on_host(numbers), strict=True):
        table[cell] += number


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
    names = _table_of_names(has_count)
    agreed = reduce(names.clone(), "max").cpu()
    if has_count and not torch.equal(agreed, names):
        raise ValueError(
            "the ranks report different stats; a loss reports the same names for every "
            f"micro-batch, with a count of 0 where a mean is over nothing; here {sorted(has_count)}"
        )
    return {_name(row): row[0] == _OWN_COUNT for row in agreed.tolist() if row[0]}


def _table_of_names(has_count: Mapping[str, bool]) -> torch.Tensor:
    """[63, 1 + 64] how each stat is divided, and the bytes of its name; rows of 0 after the last
    one."""
    table = torch.zeros((_MAX_STATS, 1 + _NAME_BYTES), dtype=torch.int64)
    for row, name in zip(table, sorted(has_count), strict=False):
        encoded = name.encode()
        row[0] = _OWN_COUNT if has_count[name] else _LOSS_WEIGHT
        row[1 : 1 + len(encoded)] = torch.tensor(list(encoded))
    return table


def _name(row: Sequence[int]) -> str:
    """The name in a row of that table."""
    return bytes(byte for byte in row[1:] if byte).decode()


def on_host(values: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """[n] numbers on the host, in float64, without their gradients. Those on a device are moved all
    at once: the host waits for it only once."""
    numbers = [torch.as_tensor(value).detach().reshape(()).to(torch.float64) for value in values]
    on_device = [number for number in numbers if number.device.type != "cpu"]
    if on_device:
        moved = iter(torch.stack(on_device).cpu())
        numbers = [next(moved) if n.device.type != "cpu" else n for n in numbers]
    if not numbers:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack(numbers)
