"""Writes an engine's tensors to files, on any number of ranks.

A rank copies its part to host memory, which is all that training waits for, and writes the copy
later. Weights that one rank holds whole become a file that transformers reads; parts become
safetensors files of each rank, in the format of torch's `HuggingFaceStorageWriter`: one file, or as
many as a rank has blocks of one tensor. `state_reading` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlcli.api.block_parts import BlockPart
from rlcli.api.engine import EngineState
from rlcli.api.model_export import in_files, write_index
from rlcli.errors import NumericError

WHOLE = "whole_shape"
"""Key of the shape of the whole tensor, next to the offsets that torch needs: from it a rank knows,
without looking into the files of all others, whether a file is of the same tensor."""
Tensors = Mapping[str, torch.Tensor | BlockPart]


@dataclass(frozen=True)
class TensorPart:
    """A block of a tensor, on the host."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


@dataclass(frozen=True)
class HostCopy:
    """What one rank writes of a role."""

    weights: Mapping[str, tuple[TensorPart, ...]]
    optimizer: Mapping[str, tuple[TensorPart, ...]]
    is_whole: bool
    """The weights are all here, not spread over ranks."""
    leads: bool
    """This rank writes what is identical on all ranks of the role."""


def copy_to_host(state: EngineState, leads: bool) -> HostCopy:
    """Copy this rank's parts. Of tensors that are identical on all ranks, the rank that `leads`
    keeps the only copy."""
    return HostCopy(
        weights=_parts(state.weights, leads, again=not state.is_copy),
        optimizer=_parts(state.optimizer, leads, again=not state.is_copy),
        is_whole=not any(map(_is_spread, state.weights.values())),
        leads=leads,
    )


def size_of(tensors: Tensors, leads: bool) -> int:
    """Bytes that a rank would copy of these tensors."""
    written = [tensor for tensor in tensors.values() if _is_ours(tensor, leads)]
    return sum(
        local.numel() * local.element_size()
        for tensor in written
        for local, _ in local_blocks(tensor)
    )


def write_weights(copy: HostCopy, folder: Path, rank: int) -> list[Path]:
    """Write a rank's weights into a model's folder; returns the files.
    Raises NumericError if they contain a NaN."""
    refuse_nonfinite(copy)
    if not copy.weights:
        return []
    if copy.is_whole:
        return _write_whole({name: block.tensor for name, (block,) in copy.weights.items()}, folder)
    return _write_parts(copy.weights, folder, rank)


def write_optimizer(copy: HostCopy, folder: Path, rank: int) -> list[Path]:
    """Write a rank's part of the optimizer state; returns the files."""
    return _write_parts(copy.optimizer, folder, rank) if copy.optimizer else []


def refuse_nonfinite(copy: HostCopy) -> None:
    """Never commit values that are not finite: nothing could be resumed from them. Raises
    NumericError F35."""
    for name, parts in (*copy.weights.items(), *copy.optimizer.items()):
        if any(
            block.tensor.is_floating_point() and not block.tensor.isfinite().all()
            for block in parts
        ):
            raise NumericError(
                f"{name} holds values that are not finite; no checkpoint is written", code="F35"
            )


def writers_of(tensors: Tensors, rank: int, first: int) -> set[int]:
    """The ranks that write, in the present layout, the blocks that this rank holds. `first`: the
    rank that leads the role."""
    writers = {rank}
    shares: list[Any] = [*tensors.values()]
    for tensor in shares:
        if hasattr(tensor, "placements"):
            coordinates = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
            at = tuple(
                0 if placement.is_replicate() else coordinate
                for coordinate, placement in coordinates
            )
            writers.add(int(tensor.device_mesh.mesh[at]))
        elif not isinstance(tensor, BlockPart):
            writers.add(first)
    return writers


def _parts(tensors: Tensors, leads: bool, again: bool) -> dict[str, tuple[TensorPart, ...]]:
    parts = {}
    for name, tensor in tensors.items():
        if _is_ours(tensor, leads):
            blocks = [(local, offsets) for local, offsets in local_blocks(tensor) if local.numel()]
            if blocks:
                parts[name] = tuple(
                    TensorPart(
                        local.detach().to("cpu", copy=again).contiguous(),
                        offsets,
                        tuple(tensor.shape),
                    )
                    for local, offsets in blocks
                )
    return parts


def _is_spread(tensor: Any) -> bool:
    """Whether the tensor records which ranks hold which part of it."""
    return isinstance(tensor, BlockPart) or hasattr(tensor, "placements")


def _is_ours(tensor: Any, leads: bool) -> bool:
    """Whether this rank copies its part. Among ranks with the same part, the first of the tensor's
    mesh does; a tensor that is not a part of anything is identical on all ranks of the role."""
    if not hasattr(tensor, "placements"):
        return leads or isinstance(tensor, BlockPart)
    coordinates = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(coordinate == 0 for coordinate, placement in coordinates if placement.is_replicate())


def local_blocks(tensor: Any) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """The blocks that this rank holds, and where they begin."""
    if isinstance(tensor, BlockPart):
        return [(box.tensor, box.offsets) for box in tensor.boxes()]
    if not hasattr(tensor, "placements"):
        return [(tensor, (0,) * tensor.dim())]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return [(tensor.to_local(), tuple(offsets))]


def _write_whole(tensors: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    files = in_files(tensors)
    for file, content in files.items():
        contiguous = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(contiguous, folder / file, metadata={"format": "pt"})
    write_index(files, folder)
    return sorted(folder.glob("model*.safetensors*"))


def _write_parts(
    parts: Mapping[str, tuple[TensorPart, ...]], folder: Path, rank: int
) -> list[Path]:
    """A file may have a name only once: the first blocks of all tensors go into one, the second
    ones into another."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

    folder.mkdir(parents=True, exist_ok=True)
    count = max((len(blocks) for blocks in parts.values()), default=1)
    files = []
    for number in range(count):
        layer = {name: blocks[number] for name, blocks in parts.items() if number < len(blocks)}
        offsets = {
            name: {SAVED_OFFSETS_KEY: list(block.offsets), WHOLE: list(block.shape)}
            for name, block in layer.items()
        }
        # a single entry: several are written in random order
        metadata = {CUSTOM_METADATA_KEY: json.dumps(offsets)}
        files.append(
            folder / f"shard-{rank + 1:05d}-model-{number + 1:05d}-of-{count:05d}.safetensors"
        )
        save_file(
            {name: block.tensor for name, block in layer.items()}, files[-1], metadata=metadata
        )
    return files
