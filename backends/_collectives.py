"""Collectives of the ranks of a role."""

from __future__ import annotations

import torch
import torch.distributed as dist

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)
_MOST_DIMENSIONS = 6


def all_reduced(
    value: torch.Tensor, operation: str, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The sum, maximum or minimum of a tensor over the ranks of a group; None: there is only this
    rank."""
    if group is None or group.size() == 1:
        return value
    reduced = value.detach().clone()
    dist.all_reduce(reduced, op=_OPERATIONS[operation], group=group)
    return reduced


def from_last_rank(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor of the last rank of a group, on all of its ranks. The others give any tensor, on
    the device where they want it: dtype and shape are sent too."""
    last = dist.get_global_rank(group, group.size() - 1)
    sent = value.detach().contiguous()
    description = _description(sent)
    dist.broadcast(description, last, group)
    if dist.get_rank() != last:
        sent = _described_by(description)
    dist.broadcast(sent, last, group)
    return sent


def _description(value: torch.Tensor) -> torch.Tensor:
    """Dtype and shape as numbers, on the device of the tensor."""
    shape = [*value.shape, *[0] * (_MOST_DIMENSIONS - value.dim())]
    return torch.tensor([_DTYPES.index(value.dtype), value.dim(), *shape], device=value.device)


def _described_by(description: torch.Tensor) -> torch.Tensor:
    """An empty tensor with this dtype and shape."""
    dtype, dimensions, *shape = description.tolist()
    return torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=description.device)
