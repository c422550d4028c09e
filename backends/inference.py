"""Forward passes and generation only: for reference, reward and rollout roles that are not trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.limits import Limits, check_limits
from rlcli.api.model import Model, ModelBackend, register_backend


@register_backend("inference")
@dataclass(frozen=True, kw_only=True)
class Inference(ModelBackend):
    """A whole copy of the model on every rank, without gradients or optimizer."""

    TRAINS: ClassVar[bool] = False
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp",)
    LIMITS: ClassVar[Limits] = {"kv_cache_tokens": {"ge": 1}}

    dtype: str = "auto"
    """Of matrix products: float32, bfloat16, or auto (bfloat16 where the hardware has it)."""

    kv_cache_tokens: int | None = None
    """Tokens, of prompts and responses, that a rank's KV cache has room for. Each response reserves the longest prompt
    and `max_new_tokens`; as many are decoded at once as fit. null: room for `max_concurrent_responses` of them."""

    def __post_init__(self) -> None:
        check_limits(self)

    def _initialize(self, model: Model) -> Model:
        from ._engine import TransformersEngine

        engine = TransformersEngine(model, self.dtype, self.kv_cache_tokens)
        engine.lm.requires_grad_(False)
        model.module = engine
        return model
