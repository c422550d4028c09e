"""Forward passes and generation only: for reference, reward and rollout roles that are not trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.model import Model, ModelBackend, register_backend

from ._settings import TransformersSettings


@register_backend("inference")
@dataclass(frozen=True, kw_only=True)
class Inference(TransformersSettings, ModelBackend):
    """A copy of the model on every data-parallel rank, sharded over tensor-parallel ranks, without an optimizer."""

    TRAINS: ClassVar[bool] = False
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp", "tp")
    MEMORY: ClassVar[str] = "_memory.InferenceMemory"

    def _initialize(self, model: Model) -> Model:
        from ._engine import TransformersEngine

        engine = TransformersEngine(model, self.dtype, self.kv_cache_tokens)
        engine.lm.requires_grad_(False)
        model.module = engine
        return model
