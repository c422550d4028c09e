"""A model source over a model created by a test."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from rlcli.api.model_source import ModelSource, Region, bounds, row_blocks
from rlcli.api.value_model import value_head


class HeldSource(ModelSource):
    """Provides the weights that a module has at the time of reading."""

    def __init__(self, lm: nn.Module):
        self.lm = lm
        self.config = lm.config
        self.head = "lm" if value_head(lm) is None else "value"
        self.dtype = next(lm.parameters()).dtype

    def skeleton(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        lm = copy.deepcopy(self.lm)
        on_meta: dict[nn.Parameter, nn.Parameter] = {}
        for module in lm.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    empty = torch.empty_like(parameter, device="meta", dtype=dtype)
                    on_meta.setdefault(
                        parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    )
                    module._parameters[name] = on_meta[parameter]
        return lm.eval()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.lm.state_dict()[name].shape)

    def blocks(self, name: str, region: Region = ()) -> Iterator[tuple[int, torch.Tensor]]:
        tensor = self.lm.state_dict()[name]
        if not tensor.dim():
            yield 0, tensor
            return
        rows, *others = bounds(region, tensor.shape)
        for block in row_blocks(tensor.shape, rows):
            start = block.first + block.selected.start
            columns = tensor[(slice(start, block.first + block.selected.stop), *others)]
            yield start - rows.start, columns
