"""DeepSpeed ZeRO: data-parallel ranks shard more with each stage, and may keep it in host memory.

Stage 0 shards nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters. Parameters and
optimizer state are float32, matrix products run in `dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.limits import ArgumentCheck, Limits
from rlcli.api.model import Model, ModelBackend, register_backend

from ._argument_checks import check_zero
from ._settings import TransformersTraining


@register_backend("deepspeed")
@dataclass(frozen=True, kw_only=True)
class DeepSpeed(TransformersTraining, ModelBackend):
    """Trains a transformers model with DeepSpeed's ZeRO."""

    REQUIRES: ClassVar[tuple[str, ...]] = ("deepspeed",)
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp",)
    ROUTING_REPLAY: ClassVar[bool] = True
    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = "_argument_checks.check_zero"
    ELSEWHERE: ClassVar[str] = "zero1 zero2 zero3 zero_1 zero_2 zero_3 ds"
    LAYOUT: ClassVar[str] = "_layouts.problems"
    WHOLE_SEQUENCES: ClassVar[str] = "_layouts.whole_sequences"
    MEMORY: ClassVar[str] = "_deepspeed_memory.DeepSpeedMemory"
    LIMITS: ClassVar[Limits] = {"zero_stage": {"ge": 0, "le": 3}}
    ON_RESUME: ClassVar[dict[str, str]] = {
        "zero_stage": "safe",
        "offload_optimizer": "safe",
        "offload_parameters": "safe",
    }

    zero_stage: int = 2
    """What ranks shard: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters."""

    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and run its step there; stages 1 to 3."""

    offload_parameters: bool = False
    """Keep this rank's part of the parameters in host memory and fetch them when needed;
    stage 3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_zero(self)

    def _initialize(self, model: Model) -> Model:
        from ._deepspeed_engine import DeepSpeedEngine

        model.module = DeepSpeedEngine(model, self)
        return model

    def destroy(self, model: Model) -> None:
        model.module.close()
