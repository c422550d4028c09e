"""Ranges of tensors, as ranks hold them if a library concatenates parameters and cuts the result
into equal parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Box:
    """A block of a tensor."""

    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    tensor: torch.Tensor
    """A live view."""


@dataclass(frozen=True)
class FlatPart:
    """The elements of a tensor that this rank holds, in row-major order, starting at `start`.

    In an `EngineState` it represents the whole tensor,
    as a DTensor does if parts are blocks of rows.

    torch's distributed checkpoint reads into it through the last two methods.
    """

    shape: torch.Size
    """Shape of the whole tensor."""
    start: int
    values: torch.Tensor
    """[n], live; n may be 0."""
    group: Any
    """The ranks that together hold each element once."""

    def boxes(self) -> list[Box]:
        """The range as blocks, which are all that files can describe: part of a row,
        whole rows, part of a row."""
        boxes, taken = [], 0
        for offsets, sizes in _boxes(
            tuple(self.shape), self.start, self.start + self.values.numel()
        ):
            count = math.prod(sizes)
            boxes.append(Box(offsets, self.values[taken : taken + count].view(sizes)))
            taken += count
        return boxes

    def dim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def is_floating_point(self) -> bool:
        return self.values.is_floating_point()

    def to_local(self) -> torch.Tensor:
        """[n]: what this rank holds."""
        return self.values

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every rank of the group; all of them must call it."""
        full = torch.zeros(
            math.prod(self.shape), dtype=self.values.dtype, device=self.values.device
        )
        full[self.start : self.start + self.values.numel()] = self.values
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(full, group=self.group)
        return full.view(self.shape)

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape) for box in self.boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return next(box.tensor for box in self.boxes() if box.offsets == tuple(index.offset))


def _boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the blocks that make up elements `start` to `stop`, in their order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = row * math.prod(shape[1:])
    for offsets, sizes in _boxes(shape[1:], start - before, stop - before):
        yield (row, *offsets), (1, *sizes)
