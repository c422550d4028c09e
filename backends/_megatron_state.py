"""The state of a stage in a checkpoint: tensors under transformers' names, divided so that any
layout can load them.

Megatron's own parameters are fused, and its optimizer's shares have no rows. Here, every number has
its place in one of transformers' parameters: tensor-parallel ranks divide these as in the model,
and data-parallel ranks divide the rows of the result, for both weights and optimizer. So each rank
writes, and reads, an equal part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlcli.api.model import EngineState

from ._megatron_groups import RoleGroups
from ._megatron_layout import HeldPart, Share, StageLayout
from ._megatron_optimizer import MOMENTS, ShardedAdamW

STEP = "step"


class StageState:
    """Converts what this rank holds to tensors of a checkpoint, and back."""

    def __init__(
        self, stage: nn.Module, layout: StageLayout, optimizer: ShardedAdamW, groups: RoleGroups
    ):
        self._stage = stage
        self._layout = layout
        self._optimizer = optimizer
        self._groups = groups
        self._mesh = self._make_mesh() if groups.all.size() > 1 else None

    def give(self, room_for_optimizer: bool) -> EngineState:
        """Copies on the host, only of this rank's part. All ranks of the role call it."""
        if room_for_optimizer:
            self._optimizer.make_room()
        weights: dict[str, torch.Tensor] = {}
        moments: dict[str, torch.Tensor] = {}
        steps = self._optimizer.steps
        for share, parameter in self._owned():
            for held_part, tensor in self._layout.separate(
                share, self._optimizer.weight(parameter)
            ):
                weights[held_part.name] = self._spread(held_part, tensor)
            if steps is None or not parameter.requires_grad:
                continue
            for moment in MOMENTS:
                values = self._optimizer.gathered(parameter, moment)
                for held_part, tensor in self._layout.separate(share, values):
                    moments[f"{held_part.name}/{moment}"] = self._spread(held_part, tensor)
            for held_part in self._layout.parts(share).values():
                moments[f"{held_part.name}/{STEP}"] = self._alike(
                    torch.tensor(steps, dtype=torch.float32)
                )
        return EngineState(weights, moments, is_copy=True)

    def take(self, state: EngineState) -> None:
        """Put the tensors of a state into their places. All ranks of the role call it."""
        with torch.no_grad():
            for name, parameter in self._stage.named_parameters():
                share = self._layout.shares[name]
                self._optimizer.set_weight(
                    parameter, self._whole(share, parameter, state.weights, "")
                )
                if state.optimizer and parameter.requires_grad:
                    for moment in MOMENTS:
                        values = self._whole(share, parameter, state.optimizer, f"/{moment}")
                        self._optimizer.scatter(parameter, moment, values)
        if state.optimizer:
            steps: Any = next(
                tensor for name, tensor in state.optimizer.items() if name.endswith(f"/{STEP}")
            )
            self._optimizer.set_steps(int(steps.to_local() if self._mesh is not None else steps))

    def _whole(
        self, share: Share, parameter: nn.Parameter, tensors: Mapping[str, Any], suffix: str
    ) -> torch.Tensor:
        """The value of a parameter in a state, in the parameter's shape; for a copy,
        the first stage sends it."""
        values = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        if not share.is_copy:
            self._layout.join(share, self._gathered(share, tensors, suffix, values), values)
        # an embedding that is also the head, and that head
        if getattr(parameter, "shared_embedding", False):
            assert self._groups.ends is not None
            dist.broadcast(values, dist.get_global_rank(self._groups.ends, 0), self._groups.ends)
        return values

    # -- parameters --------------------------------------------------------------------------------

    def _owned(self) -> Iterator[tuple[Share, nn.Parameter]]:
        """Parameters, except copies of those of another stage."""
        for name, parameter in self._stage.named_parameters():
            share = self._layout.shares[name]
            if not share.is_copy:
                yield share, parameter

    # -- parts -------------------------------------------------------------------------------------

    def _make_mesh(self) -> DeviceMesh:
        """The mesh of this stage's ranks; on the host, because it is not used for communication."""
        groups, ranks = [self._groups.tp, self._groups.dp], torch.tensor(self._groups.stage)
        return DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("tp", "dp"))

    def _placements(self, axis: int | None) -> tuple[Placement, Placement]:
        return (Replicate() if axis is None else Shard(axis)), Shard(0)

    def _own_region(self, held_part: HeldPart) -> tuple[slice, ...]:
        """The region of a part that this rank keeps, relative to the start of the part."""
        assert self._mesh is not None
        sizes, offsets = compute_local_shape_and_global_offset(
            held_part.shape, self._mesh, self._placements(held_part.axis)
        )
        starts = [at - span.start for at, span in zip(offsets, held_part.region, strict=True)]
        return tuple(
            slice(at, at + size) if size else slice(0, 0)
            for at, size in zip(starts, sizes, strict=True)
        )

    def _spread(self, held_part: HeldPart, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's share of a part, as a part of the whole parameter."""
        if self._mesh is None:
            return tensor.to("cpu", copy=True)
        values = tensor[self._own_region(held_part)].to("cpu", copy=True).contiguous()
        return _part_of(values, self._mesh, self._placements(held_part.axis), held_part.shape)

    def _alike(self, number: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return number
        return _part_of(number, self._mesh, (Replicate(), Replicate()), ())

    def _gathered(
        self, share: Share, tensors: Mapping[str, Any], suffix: str, like: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Name in transformers → part of a parameter, gathered from the shares of data-parallel
        ranks."""
        parameters = {}
        for held_part in self._layout.parts(share).values():
            stored: Any = tensors[held_part.name + suffix]
            if self._mesh is None:
                parameters[held_part.name] = stored.to(like)
                continue
            sizes = [extent.stop - extent.start for extent in held_part.region]
            values = torch.zeros(sizes, dtype=stored.dtype, device=like.device)
            values[self._own_region(held_part)] = stored.to_local().to(like.device)
            if self._groups.dp.size() > 1:  # each number is on one rank; the others have 0
                dist.all_reduce(values, group=self._groups.dp)
            parameters[held_part.name] = values.to(like.dtype)
        return parameters


def _part_of(
    values: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, Placement],
    shape: tuple[int, ...],
) -> torch.Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        values, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
