"""Safetensors files by the byte: which tensors a folder holds and where each of their bytes is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.api.model_folder import check_folder
from rlcli.api.weight_files import BYTES, Head, damaged, read_head, weight_files
from rlcli.checkpoint.tensor_dtypes import Raw, raw_type
from rlcli.errors import ModelError

SHARDING = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
"""Keys under which torch.distributed.checkpoint stores where a part begins in the whole tensor."""

FILE_ORDER = ("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16",
              "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")  # fmt: skip
"""Types of numbers in the order in which the safetensors library stores them."""


@dataclass(frozen=True)
class Extent:
    """Consecutive bytes of a file."""

    file: Path
    start: int
    bytes: int


@dataclass(frozen=True)
class TensorSpec:
    """A file's description of a tensor."""

    name: str
    dtype: str
    """As in a safetensors header: F32, BF16, …"""
    shape: tuple[int, ...]

    @cached_property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that one file holds."""

    extent: Extent
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in one file, or in pieces in several."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]

    @property
    def extents(self) -> list[Extent] | None:
        """The tensor's bytes in order, if its pieces are blocks of rows."""
        if any(
            any(piece.offsets[1:]) or piece.shape[1:] != self.spec.shape[1:]
            for piece in self.pieces
        ):
            return None
        return [piece.extent for piece in self.pieces]

    def read(self) -> Raw:
        """The whole tensor's bits, in its shape."""
        array = np.empty(self.spec.shape, raw_type(self.spec.dtype))
        by_rows = self.extents is not None
        for piece in self.pieces:
            region = tuple(
                slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True)
            )
            block = array[region] if by_rows else np.empty(piece.shape, array.dtype)
            with piece.extent.file.open("rb", buffering=0) as file:
                read_into(file.fileno(), piece.extent, block)
            if not by_rows:
                array[region] = block
        return array


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model's folder. Raises ModelError if the folder is not complete,
    valid and harmless."""
    check_folder(folder, weights=True)
    pieces: dict[str, list[tuple[str, Piece]]] = {}
    for file in weight_files(folder):
        for spec, piece in _specs(read_head(file)):
            pieces.setdefault(spec.name, []).append((spec.dtype, piece))
    return {name: _assembled(name, pieces_of_tensor) for name, pieces_of_tensor in pieces.items()}


def in_file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """In the order of the safetensors library: wide numbers first, then by name."""
    return sorted(specs, key=lambda spec: (FILE_ORDER.index(spec.dtype), spec.name))


def _specs(head: Head) -> Iterator[tuple[TensorSpec, Piece]]:
    """What a file holds, and which part of a tensor that is."""
    try:
        sharding = json.loads(head.metadata[SHARDING]) if SHARDING in head.metadata else None
        for name, entry in head.tensors.items():
            shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
            if entry["dtype"] not in BYTES:
                raise ModelError(
                    f"{name} is of type {entry['dtype']}, which rlcli does not support",
                    where=str(head.file),
                )
            stored = [0] * len(shape) if sharding is None else sharding[name][OFFSETS]
            offsets = _checked_offsets(name, stored, shape)
            extent = Extent(head.file, head.start + start, end - start)
            yield TensorSpec(name, entry["dtype"], shape), Piece(extent, shape, offsets)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(head.file, error) from error


def _checked_offsets(name: str, offsets: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where a piece begins in each dimension of its tensor. Raises ValueError."""
    checked = tuple(offsets)
    if len(checked) != len(shape) or any(type(at) is not int or at < 0 for at in checked):
        raise ValueError(f"{name} has offsets {checked}")
    return checked


def _assembled(name: str, typed_pieces: Sequence[tuple[str, Piece]]) -> StoredTensor:
    """A tensor from its pieces, which must tile it exactly."""
    dtypes = {dtype for dtype, _ in typed_pieces}
    ranks = {len(piece.shape) for _, piece in typed_pieces}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise ModelError(f"the pieces of {name} are of different types or dimensions")
    pieces = sorted((piece for _, piece in typed_pieces), key=lambda piece: piece.offsets)
    ends = [
        [at + size for at, size in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces
    ]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    twice = next(_overlapping(pieces), None)
    if twice is not None:
        raise ModelError(f"{name} is stored twice", where=str(twice.extent.file))
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        raise ModelError(f"a piece of {name} is missing", hint="the file of a rank may be missing")
    return StoredTensor(TensorSpec(name, dtypes.pop(), shape), tuple(pieces))


def _overlapping(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces that share an element with a later one, if they are in order."""
    for number, piece in enumerate(pieces):
        near = takewhile(partial(_begins_within, piece), islice(pieces, number + 1, None))
        if any(_overlap(piece, following) for following in near):
            yield piece


def _begins_within(first: Piece, second: Piece) -> bool:
    """Whether the first row of `second` is among those of `first`."""
    return not first.shape or second.offsets[0] < first.offsets[0] + first.shape[0]


def _overlap(first: Piece, second: Piece) -> bool:
    spans = zip(first.offsets, first.shape, second.offsets, second.shape, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in spans)


def read_into(descriptor: int, extent: Extent, array: Raw) -> None:
    """Fill an array with the bytes of an extent. Raises ModelError if the file ends before."""
    view = bytes_of(array)
    done = 0
    while done < extent.bytes:
        count = os.preadv(descriptor, [view[done:]], extent.start + done)
        if count == 0:
            raise became_shorter(extent.file)
        done += count


def bytes_of(array: Raw) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def became_shorter(file: Path) -> ModelError:
    return ModelError("it became shorter while it was read", where=str(file))
