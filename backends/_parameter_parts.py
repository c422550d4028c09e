"""The part of a parameter that a rank holds, and the whole parameter from all parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from rlcli.api.block_parts import BlockPart
from rlcli.api.model_source import local_part
from rlcli.api.weight_blocks import WeightBlock


def held_blocks(name: str, parameter: Any) -> Iterator[tuple[WeightBlock, torch.Tensor]]:
    """This rank's blocks of a parameter, as live tensors."""
    if isinstance(parameter, BlockPart):
        for box in parameter.boxes():
            yield (
                WeightBlock(name, tuple(parameter.shape), box.offsets, tuple(box.tensor.shape)),
                box.tensor,
            )
        return
    values, region = local_part(parameter)
    if values.numel():
        yield WeightBlock.of_region(name, parameter.shape, region), values


def gathered(tensor: Any) -> torch.Tensor:
    """The whole parameter, on every rank. Offloaded parts of a DTensor are gathered on the
    devices."""
    if isinstance(tensor, BlockPart):
        return tensor.full_tensor()
    if not isinstance(tensor, DTensor):
        return tensor
    on_devices: Any = tensor.to(tensor.device_mesh.device_type)
    return on_devices.full_tensor()


def gathered_beyond(tensor: Any, mesh: Any) -> torch.Tensor:
    """A DTensor gathered over all dimensions of its mesh except that of `mesh`, which has a single
    one (None: over all)."""
    if mesh is None:
        return gathered(tensor)
    spread: Any = tensor.to(tensor.device_mesh.device_type)
    (name,) = mesh.mesh_dim_names
    axes = spread.device_mesh.mesh_dim_names
    placement = spread.placements[axes.index(name)]
    block = spread.redistribute(
        placements=[placement if axis == name else Replicate() for axis in axes]
    ).to_local()
    return DTensor.from_local(
        block, mesh, [placement], run_check=False, shape=spread.shape, stride=spread.stride()
    )
