"""Parts of tensors that are not one block for each rank: ranges, if a library concatenates
parameters and cuts the result into equal parts; several blocks, if it fuses matrices and divides
each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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

    @property
    def region(self) -> tuple[slice, ...]:
        """The block as an index of the whole tensor."""
        spans = zip(self.offsets, self.tensor.shape, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in spans)


Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block."""


@dataclass(frozen=True)
class BlockPart:
    """Any blocks of a tensor, as this rank holds them.

    In an `EngineState` it represents the whole tensor, as a DTensor does if each rank has one block
    and ranks with the same one are known.

    torch's distributed checkpoint reads into it through the last two methods.
    """

    shape: torch.Size
    """Shape of the whole tensor."""
    spans: tuple[Span, ...]
    values: torch.Tensor
    """[n], live: the elements of one block after another; n may be 0."""
    group: Any
    """The ranks that together hold each element once; None for this one alone."""

    @classmethod
    def of(cls, shape: Sequence[int], spans: Iterable[Span], group: Any) -> BlockPart:
        """A part with room for the blocks: float32 on the host, all zeros."""
        filled = tuple((offsets, sizes) for offsets, sizes in spans if math.prod(sizes))
        count = sum(math.prod(sizes) for _, sizes in filled)
        return cls(torch.Size(shape), filled, torch.zeros(count), group)

    def boxes(self) -> list[Box]:
        counts = [math.prod(sizes) for _, sizes in self.spans]
        return [
            Box(offsets, values.view(sizes))
            for (offsets, sizes), values in zip(self.spans, self.values.split(counts), strict=True)
        ]

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
        full = torch.zeros(self.shape, dtype=self.values.dtype, device=self.values.device)
        for box in self.boxes():
            full[box.region] = box.tensor
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(full, group=self.group)
        return full

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape) for box in self.boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return next(box.tensor for box in self.boxes() if box.offsets == tuple(index.offset))


def flat_part(shape: Sequence[int], start: int, values: torch.Tensor, group: Any) -> BlockPart:
    """The elements of a tensor in row-major order, starting at `start`, as blocks, which are all
    that files can describe: part of a row, whole rows, part of a row."""
    spans = tuple(_boxes(tuple(shape), start, start + values.numel()))
    return BlockPart(torch.Size(shape), spans, values, group)


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
