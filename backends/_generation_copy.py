"""The copy of a model that a call generates with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from rlcli.api.model_source import parameter_places
from rlcli.ops.packed_product import packed, product

from ._packable import is_plain_linear
from ._tensor_plan import planned_styles
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
        groups = layers_by_input(self.lm) if can_pack else []
        self._products = [JointProduct(layers) for layers in groups]

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
                self._fill(name, parameter, empty[name].requires_grad)
            for joint in self._products if packs else ():
                joint.pack()
            yield self.lm
        finally:
            for name, parameter in empty.items():
                for owner, attribute in self._places[name]:
                    setattr(owner, attribute, parameter)

    def _fill(self, name: str, value: torch.Tensor, requires_grad: bool) -> None:
        for module, attribute in self._places[name]:
            is_multiplied = is_plain_linear(module) and attribute == "weight"
            matrix = value.to(self._dtype) if is_multiplied else value
            setattr(module, attribute, nn.Parameter(matrix, requires_grad=requires_grad))


class JointProduct:
    """Linear layers that multiply the same input. With packed weights, the first call computes all
    of their results, by one product: to start one takes oneDNN as long as a tenth of a product of
    a single row."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self._layers = layers
        self._input: torch.Tensor | None = None
        self._results: dict[nn.Linear, torch.Tensor] = {}
        """Of layers that have not been called with the input yet."""
        for layer in layers:
            layer.forward = partial(self._result, layer)  # type: ignore[method-assign]

    def pack(self) -> None:
        """The first layer then holds the matrices of all, packed as one, and their biases."""
        weights, biases = zip(*((layer.weight, layer.bias) for layer in self._layers), strict=True)
        for layer in self._layers:
            layer.weight = nn.Parameter(layer.weight.new_empty(0))
        first = self._layers[0]
        first.weight = nn.Parameter(packed(torch.cat(weights)))
        if first.bias is not None:
            first.bias = nn.Parameter(torch.cat(biases).to(first.weight.dtype))

    def _result(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._layers[0].weight, self._layers[0].bias
        if not weight.is_mkldnn:
            return product(x, layer.weight, layer.bias)
        if x is not self._input or layer not in self._results:
            joint = product(x.to(weight.dtype), weight, bias)
            parts = joint.split([each.out_features for each in self._layers], -1)
            self._input, self._results = x, dict(zip(self._layers, parts, strict=True))
        result = self._results.pop(layer)
        if not self._results:
            self._input = None
        return result.contiguous()


def layers_by_input(lm: nn.Module) -> list[list[nn.Linear]]:
    """The plain linear layers of a model, those that multiply the same input together: parts of one
    module that a tensor-parallel plan divides by columns."""
    styles = planned_styles(lm)
    groups: dict[tuple[object, ...], list[nn.Linear]] = defaultdict(list)
    for name, layer in lm.named_modules():
        if is_plain_linear(layer):
            parent = name.rpartition(".")[0] if styles.get(name) == "colwise" else name
            groups[parent, layer.in_features, layer.bias is None].append(layer)
    return list(groups.values())
