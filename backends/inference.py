"""Forward passes and generation only: for reference,
reward and rollout roles that are not trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from rlcli.api.model import Model, ModelBackend, register_backend
from rlcli.api.model_source import parameter_places

from ._engine import TransformersEngine
from ._settings import ComputeDtype, ContextParallelism, TransformersSettings
from ._transformers import linear_matrices


@register_backend("inference")
@dataclass(frozen=True, kw_only=True)
class Inference(ContextParallelism, TransformersSettings, ModelBackend):
    """A copy of the model on every data- and context-parallel rank, sharded over tensor-parallel
    ranks, without an optimizer."""

    ELSEWHERE: ClassVar[str] = "transformers huggingface hf"
    TRAINS: ClassVar[bool] = False
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp", "tp", "cp")
    STREAMS: ClassVar[bool] = True
    ROUTING_REPLAY: ClassVar[bool] = True
    LAYOUT: ClassVar[str] = "_layouts.problems"
    WHOLE_SEQUENCES: ClassVar[str] = "_layouts.whole_sequences"
    MEMORY: ClassVar[str] = "_memory.InferenceMemory"
    ROUNDS_WEIGHTS: ClassVar[dict[str, tuple[str, ...]]] = {"dtype": ("bfloat16",)}

    dtype: ComputeDtype = "auto"
    """dtype of matrix products. With bfloat16, the matrices of linear layers are also stored in it,
    which gives the same numbers with half the memory. auto: on GPUs bfloat16 if they multiply it,
    with weights in float32; on a CPU what a measurement at the start of the run finds faster."""

    def _initialize(self, model: Model) -> Model:
        model.module = InferenceEngine(model, self)
        return model


class InferenceEngine(TransformersEngine):
    """A transformers model whose weights only change when they are copied from another role."""

    def __init__(self, model: Model, settings: Inference):
        self._holds_bfloat16 = settings.dtype == "bfloat16"
        super().__init__(model, settings)
        self.lm.requires_grad_(False)

    def _lay_out(self, model: Model) -> None:
        """Autocast casts the matrices of linear layers at every use,
        so they can be held as it casts them."""
        if not self._holds_bfloat16:
            return
        places = parameter_places(self.lm)
        parameters = dict(self.lm.named_parameters())
        for name in linear_matrices(self.lm):
            narrow = nn.Parameter(parameters[name].detach().to(torch.bfloat16), requires_grad=False)
            for module, attribute in places[name]:
                setattr(module, attribute, narrow)
