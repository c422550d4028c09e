"""The state of a stage in a checkpoint: tensors under transformers' names, divided so that any
layout can load them.

Megatron's own parameters are fused, and its optimizer's shares have no rows. Here, every number has
its place in one of transformers' parameters: tensor-parallel ranks divide these as in the model,
and ranks that hold the same divide the result, for both weights and optimizer. So each rank writes,
and reads, an equal part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from rlcli.api.block_parts import BlockPart, Span
from rlcli.api.model import EngineState

from ._megatron_groups import RoleGroups
from ._megatron_layout import Held, HeldPart, Share, StageLayout
from ._megatron_optimizer import MOMENTS, ShardedAdamW

STEP = "step"

Values = Callable[[nn.Parameter], torch.Tensor]


class StageState:
    """Converts what this rank holds to tensors of a checkpoint, and back."""

    def __init__(
        self, parameters: Held, layout: StageLayout, optimizer: ShardedAdamW, groups: RoleGroups
    ):
        self._parameters = parameters
        self._layout = layout
        self._optimizer = optimizer
        self._groups = groups
        self._is_alone = groups.all.size() == 1
        self._mesh = None if self._is_alone else _mesh_of(groups.stage)

    def give(self, room_for_optimizer: bool) -> EngineState:
        """Copies on the host, only of this rank's part. All ranks of the role call it."""
        if room_for_optimizer:
            self._optimizer.make_room()
        optimizer, steps = self._optimizer, self._optimizer.steps
        weights: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        for share, parameter in self._owned():
            weights |= self._given(share, optimizer.weight(parameter), "")
            if steps is None or not parameter.requires_grad:
                continue
            for moment in MOMENTS:
                moments |= self._given(share, optimizer.gathered(parameter, moment), f"/{moment}")
            for held_part in self._layout.parts(share):
                moments[f"{held_part.name}/{STEP}"] = self._alike(float(steps))
        return EngineState(weights, moments, is_copy=True)

    def take(self, state: EngineState) -> None:
        """Put the tensors of a state into their places. All ranks of the role call it."""
        optimizer = self._optimizer
        with torch.no_grad():
            for share, parameter in self._parameters:
                optimizer.set_weight(parameter, self._taken(share, parameter, state.weights, ""))
                if state.optimizer and parameter.requires_grad:
                    for moment in MOMENTS:
                        values = self._taken(share, parameter, state.optimizer, f"/{moment}")
                        optimizer.scatter(parameter, moment, values)
        if state.optimizer:
            steps: Any = next(
                tensor for name, tensor in state.optimizer.items() if name.endswith(f"/{STEP}")
            )
            optimizer.set_steps(int(steps.to_local() if isinstance(steps, DTensor) else steps))

    def _owned(self) -> Iterator[tuple[Share, nn.Parameter]]:
        """Parameters, except copies of those of another stage."""
        return ((share, parameter) for share, parameter in self._parameters if not share.is_copy)

    # -- parts -------------------------------------------------------------------------------------

    def _given(self, share: Share, values: torch.Tensor, suffix: str) -> dict[str, Any]:
        """Name in a state → a copy of this rank's part, from the whole value of a parameter."""
        separated = self._layout.separate(share, values)
        tensors: dict[str, Any] = {}
        if self._is_alone:  # its parts are all of the parameter
            for held_part, tensor in separated:
                room = torch.empty(held_part.shape, dtype=tensor.dtype)
                tensors.setdefault(held_part.name + suffix, room)[held_part.region] = tensor.cpu()
            return tensors
        parts = [part for part, _ in separated]
        for name, located in self._located(share).items():
            shape = next(part.shape for part in parts if part.name == name)
            spans = [_span(parts[number], region) for number, region in located]
            block_part = tensors[name + suffix] = BlockPart.of(shape, spans, self._groups.stage)
            for box, (number, region) in zip(block_part.boxes(), located, strict=True):
                box.tensor.copy_(separated[number][1][region])
        return tensors

    def _taken(
        self, share: Share, parameter: nn.Parameter, tensors: Mapping[str, Any], suffix: str
    ) -> torch.Tensor:
        """The value of a parameter in a state, float32 in the parameter's shape, gathered from the
        ranks that divide it; for a copy, the first stage sends it."""
        values = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        if not share.is_copy:
            self._layout.join(share, self._gathered(share, tensors, suffix, values), values)
        # an embedding that is also the head, and that head
        if getattr(parameter, "shared_embedding", False):
            assert self._groups.ends is not None
            dist.broadcast(values, dist.get_global_rank(self._groups.ends, 0), self._groups.ends)
        return values

    def _gathered(
        self, share: Share, tensors: Mapping[str, Any], suffix: str, like: torch.Tensor
    ) -> list[torch.Tensor]:
        """The parts of a parameter, in their order."""
        parts = self._layout.parts(share)
        if self._is_alone:
            return [tensors[part.name + suffix][part.region].to(like) for part in parts]
        gathered = [like.new_zeros(_sizes(part)) for part in parts]
        for name, located in self._located(share).items():
            boxes = tensors[name + suffix].boxes()
            for box, (number, region) in zip(boxes, located, strict=True):
                gathered[number][region] = box.tensor.to(like)
        for values in gathered:  # each number is on one rank; the others have 0
            dist.all_reduce(values, group=self._sharers(share))
        return gathered

    def _located(self, share: Share) -> dict[str, list[tuple[int, tuple[slice, ...]]]]:
        """Name in transformers → (number of a part, this rank's region of that part), without empty
        ones."""
        group = self._sharers(share)
        located: dict[str, list[tuple[int, tuple[slice, ...]]]] = {}
        for number, held_part in enumerate(self._layout.parts(share)):
            region = _own_region(_sizes(held_part), group.rank(), group.size())
            regions = located.setdefault(held_part.name, [])
            if all(extent.stop > extent.start for extent in region):
                regions.append((number, region))
        return located

    def _sharers(self, share: Share) -> dist.ProcessGroup:
        """The ranks that hold the same numbers of a parameter."""
        if share.experts is not None:
            return self._groups.expert_dp
        return self._groups.stage if share.axis is None else self._groups.dp_cp

    def _alike(self, number: float) -> torch.Tensor:
        """A number that all ranks of the stage have."""
        tensor = torch.tensor(number, dtype=torch.float32)
        if self._mesh is None:
            return tensor
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)


def _mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    """On the host, because it is not used for communication."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("stage",))


def _sizes(held_part: HeldPart) -> list[int]:
    return [extent.stop - extent.start for extent in held_part.region]


def _own_region(sizes: list[int], rank: int, ranks: int) -> tuple[slice, ...]:
    """A rank's region of a part of these sizes: along the first axis that has something for every
    rank, or else the first."""
    axis = next((axis for axis, size in enumerate(sizes) if size >= ranks), 0)
    each = -(-sizes[axis] // ranks)
    first = min(sizes[axis], rank * each)
    region = [slice(0, size) for size in sizes]
    region[axis] = slice(first, min(sizes[axis], first + each))
    return tuple(region)


def _span(held_part: HeldPart, region: tuple[slice, ...]) -> Span:
    """Where a region of a part is in the whole parameter."""
    starts = [extent.start for extent in held_part.region]
    offsets = tuple(start + cut.start for start, cut in zip(starts, region, strict=True))
    return offsets, tuple(cut.stop - cut.start for cut in region)
