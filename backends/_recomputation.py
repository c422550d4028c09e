"""Recomputation of activations in the backward pass, as done by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rlcli.errors import ModelError

from ._settings import Recomputation, TransformersTraining

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten._grouped_mm.default}
"""Products with weights. Those of a batch are left out: where attention is written out, they are
scores, whose number grows with the square of the length."""


class RecomputedLayers:
    """The layers of a model whose activations are recomputed: all of them, from the layer's input,
    or all but the results of products and of attention."""

    def __init__(self, lm: Any, how: Recomputation, offloads: bool):
        """`offloads`: whether the inputs of layers wait in host memory."""
        self._offloads = offloads
        arguments: dict[str, Any] = {"use_reentrant": False}
        if how == "selective":
            arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        # its name since transformers 5.20
        newest = getattr(lm, "activation_checkpointing_enable", None)
        (newest or lm.gradient_checkpointing_enable)(arguments)
        self._layers: list[nn.Module] = [
            m for m in lm.modules() if getattr(m, "gradient_checkpointing", False)
        ]

    @contextmanager
    def in_training_mode(self) -> Iterator[None]:
        """Set the layers to training mode, in which transformers recomputes them, only while
        gradients are needed: it also means dropout within them, and generation without a cache."""
        for module in self._layers:
            module.training = torch.is_grad_enabled()
        try:
            with self._offloading():
                yield
        finally:
            for module in self._layers:
                module.training = False

    def _offloading(self) -> AbstractContextManager[Any]:
        if not self._offloads:
            return nullcontext()
        return saved_tensors_hooks(_moved_to_host, _brought_back)


def recomputed_layers(lm: Any, settings: TransformersTraining) -> RecomputedLayers | None:
    """None without `gradient_checkpointing`. Raises ModelError for a family without it."""
    if not settings.gradient_checkpointing:
        return None
    if not lm.supports_gradient_checkpointing:
        message = f"transformers does not recompute activations of {lm.config.model_type}"
        raise ModelError(message, hint="set gradient_checkpointing=false in the backend's args")
    return RecomputedLayers(lm, settings.recompute, settings.offload_activations)


Offloaded = tuple[torch.device, torch.Tensor]
"""The device of a tensor, and its copy in host memory."""


def _moved_to_host(tensor: torch.Tensor) -> torch.Tensor | Offloaded:
    """The hidden states of a forward pass outside recomputed layers: the inputs of these layers,
    and what the head reads. Weights stay, and numbers of which a token has but one."""
    if _is_on_host(tensor) or tensor.is_leaf or tensor.dim() < 2:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    # the stream that computes also copies, so the copy is complete before memory is used again
    return tensor.device, pinned.copy_(tensor, non_blocking=True)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _brought_back(saved: torch.Tensor | Offloaded) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    device, pinned = saved
    return pinned.to(device, non_blocking=True)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the result of an operation is kept."""
    is_attention = "attention" in str(operation) or "attn" in str(operation)
    if operation in PRODUCTS or is_attention:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
