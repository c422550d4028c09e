"""The weights of a stage under transformers' names: whole, in the blocks that ranks exchange, and
mixed with those of other engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from rlcli.api.model import GivesParameters
from rlcli.api.weight_blocks import Region, WeightBlock

from ._megatron_groups import RoleGroups
from ._megatron_layout import Held, Share, StageLayout
from ._megatron_optimizer import ShardedAdamW

HeldBlock = tuple[WeightBlock, Share, nn.Parameter, int]
"""A block, the parameter that holds it, and its number among the parts of that parameter."""


class StageWeights:
    """Reads and writes what this rank holds."""

    def __init__(
        self, parameters: Held, layout: StageLayout, optimizer: ShardedAdamW, groups: RoleGroups
    ):
        self._parameters = parameters
        self._layout = layout
        self._optimizer = optimizer
        self._groups = groups

    def gathered(self, name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """One of transformers' parameters, gathered from the ranks that share a copy of the model.
        All of them call this."""
        values = torch.zeros(shape, device=device)
        for share, parameter in self._owned(name):
            weight = self._optimizer.weight(parameter)
            for held_part, tensor in self._layout.separate(share, weight):
                if held_part.name == name:
                    values[held_part.region] = tensor
        if self._groups.model.size() > 1:  # each number is on one rank; the others have 0
            dist.all_reduce(values, group=self._groups.model)
        return values

    def _owned(self, name: str) -> Iterator[tuple[Share, nn.Parameter]]:
        """The parameters with parts of `name` that this rank gives, among those that share a copy
        of the model."""
        for share, parameter in self._parameters:
            is_first_copy = share.experts is not None or self._groups.ep.rank() == 0
            is_given = is_first_copy and (share.axis is not None or self._groups.tp.rank() == 0)
            names = {part.name for part in self._layout.parts(share)}
            if name in names and is_given and not share.is_copy:
                yield share, parameter

    def blocks(self) -> Mapping[WeightBlock, Callable[[], torch.Tensor]]:
        return {
            block: partial(self._read, share, parameter, number)
            for block, share, parameter, number in self._blocks()
        }

    def _blocks(self) -> Iterator[HeldBlock]:
        for share, parameter in self._parameters:
            for number, held_part in enumerate(self._layout.parts(share)):
                block = WeightBlock.of_region(held_part.name, held_part.shape, held_part.region)
                if block.numbers:  # rows beyond the vocabulary belong to no part
                    yield block, share, parameter, number

    def _read(self, share: Share, parameter: nn.Parameter, number: int) -> torch.Tensor:
        return self._layout.separate(share, self._optimizer.weight(parameter))[number][1]

    def mix_in(self, source: GivesParameters, eta: float) -> None:
        """Move every weight towards that of another engine, by the share `eta`."""
        by_name: dict[str, list[HeldBlock]] = {}
        for held_block in self._blocks():
            by_name.setdefault(held_block[0].name, []).append(held_block)
        with torch.no_grad():
            for block, theirs in source.parameter_blocks():
                for mine, share, parameter, number in by_name.get(block.name, ()):
                    if (common := mine.common(block)) is not None:
                        values = theirs[common.within(block)]
                        self._mix(share, parameter, number, common.within(mine), values, eta)

    def _mix(
        self,
        share: Share,
        parameter: nn.Parameter,
        number: int,
        region: Region,
        theirs: torch.Tensor,
        eta: float,
    ) -> None:
        """Update a region of one of the parts of a parameter."""
        weight = self._optimizer.weight(parameter)
        mixed = [tensor for _, tensor in self._layout.separate(share, weight)]
        mixed[number] = mixed[number].clone()
        mixed[number][region].lerp_(theirs.to(weight), eta)
        values = torch.empty_like(weight)
        self._layout.join(share, mixed, values)
        self._optimizer.set_weight(parameter, values)
