"""The copy of a model that a call generates with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from rlcli.api.model_source import parameter_places
from rlcli.ops.packed_product import packed, product

from ._packable import is_plain_linear
from ._transformers import PackedModel


class GenerationCopy:
    """Holds no parameters except while a call uses it.

    The matrices of linear layers, including the head, are then kept in the compute dtype. Autocast
    would cast them in the same way, but once per token: it only caches casts of whole parameters
    that are trained. On request they are also packed. All other weights are those of the model
    itself, such as an embedding that is tied to the head.
    """

    def __init__(self, skeleton: nn.Module, compute_dtype: torch.dtype, can_pack: bool):
        """`can_pack`: whether weights can be packed, which come whole then."""
        self.lm = PackedModel(skeleton, compute_dtype).lm
        self._dtype = compute_dtype
        self._places = parameter_places(self.lm)
        self._can_pack = can_pack
        if can_pack:
            for module in self.lm.modules():
                if is_plain_linear(module):
                    module.forward = partial(_linear, module)  # type: ignore[method-assign]

    @contextmanager
    def of(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        buffers: Iterable[tuple[str, torch.Tensor]],
        packs: bool,
    ) -> Iterator[nn.Module]:
        """The model with these parameters by name, each as whole as in the skeleton,
        and with these buffers."""
        for name, buffer in buffers:
            module, _, attribute = name.rpartition(".")
            self.lm.get_submodule(module)._buffers[attribute] = buffer
        empty = dict(self.lm.named_parameters())
        try:
            for name, parameter in parameters:
                self._fill(name, parameter, empty[name].requires_grad, packs and self._can_pack)
            yield self.lm
        finally:
            for name, parameter in empty.items():
                for owner, attribute in self._places[name]:
                    setattr(owner, attribute, parameter)

    def _fill(self, name: str, value: torch.Tensor, requires_grad: bool, packs: bool) -> None:
        for module, attribute in self._places[name]:
            is_multiplied = is_plain_linear(module) and attribute == "weight"
            matrix = value.to(self._dtype) if is_multiplied else value
            if is_multiplied and packs:
                matrix = packed(matrix)
            setattr(module, attribute, nn.Parameter(matrix, requires_grad=requires_grad))


def _linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The forward pass of a linear layer whose weight may be packed."""
    if not layer.weight.is_mkldnn:
        return product(x, layer.weight, layer.bias)
    dtype = layer.weight.dtype
    return product(x.to(dtype), layer.weight, None if layer.bias is None else layer.bias.to(dtype))
