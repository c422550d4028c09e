"""The copy of a model that a call generates with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rlcli.api.model_source import parameter_places

from ._transformers import PackedModel, linear_matrices


class GenerationCopy:
    """Holds no parameters except while a call uses it.

    The matrices of linear layers are then kept in the compute dtype. Autocast would cast them in
    the same way, but once per token: it only caches casts of whole parameters that are trained. All
    other weights are as they are.
    """

    def __init__(self, skeleton: nn.Module, compute_dtype: torch.dtype):
        self.lm = PackedModel(skeleton, compute_dtype).lm
        self._dtype = compute_dtype
        self._places = parameter_places(self.lm)
        self._multiplied = linear_matrices(self.lm)

    @contextmanager
    def of(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        buffers: Iterable[tuple[str, torch.Tensor]],
    ) -> Iterator[nn.Module]:
        """The model with these parameters by name, each as whole as in the skeleton,
        and with these buffers."""
        for name, buffer in buffers:
            module, _, attribute = name.rpartition(".")
            self.lm.get_submodule(module)._buffers[attribute] = buffer
        empty = dict(self.lm.named_parameters())
        try:
            for name, parameter in parameters:
                value = parameter.to(self._dtype) if name in self._multiplied else parameter
                self._put(name, nn.Parameter(value, requires_grad=empty[name].requires_grad))
            yield self.lm
        finally:
            for name, parameter in empty.items():
                self._put(name, parameter)

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for module, attribute in self._places[name]:
            setattr(module, attribute, parameter)
