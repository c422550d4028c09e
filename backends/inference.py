"""Forward passes and generation only: for reference, reward and rollout roles that are not trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.model import Model, ModelBackend, register_backend


@register_backend("inference")
@dataclass(frozen=True, kw_only=True)
class Inference(ModelBackend):
    """A whole copy of the model on every rank, without gradients or optimizer."""

    TRAINS: ClassVar[bool] = False
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp",)

    dtype: str = "auto"
    """Of matrix products: float32, bfloat16, or auto (bfloat16 where the hardware has it)."""

    def _initialize(self, model: Model) -> Model:
        from ._engine import TransformersEngine

        engine = TransformersEngine(model, self.dtype)
        engine.lm.requires_grad_(False)
        model.module = engine
        return model
