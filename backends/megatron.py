"""Megatron-Core's GPTModel: tensor, pipeline, context and data parallelism, and the distributed
optimizer.

Needs CUDA devices, and `pip install 'rlcli[megatron]'`. Sequences are packed: the attention is that
of the other engines (`rlcli.ops`), in Megatron's blocks. Its sequence parallelism is not offered.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.limits import ArgumentCheck, Limits
from rlcli.api.model import Model, ModelBackend, register_backend
from rlcli.errors import ResourceError

from ._argument_checks import check_megatron
from ._settings import (
    ComputeDtype,
    ContextParallelism,
    Recomputation,
    RouterLosses,
    TrainingSettings,
)


@register_backend("megatron")
@dataclass(frozen=True, kw_only=True)
class Megatron(ContextParallelism, RouterLosses, TrainingSettings, ModelBackend):
    """Trains a model of the llama, qwen2, qwen3 or mistral family, or one with a mixture of
    experts, with every kind of parallelism; it does not generate."""

    ELSEWHERE: ClassVar[str] = "mcore nemo"
    REQUIRES: ClassVar[tuple[str, ...]] = ("megatron-core",)
    GENERATES: ClassVar[bool] = False
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp", "tp", "pp", "cp", "ep")
    ROUTING_REPLAY: ClassVar[bool] = True
    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = "_argument_checks.check_megatron"
    MEMORY: ClassVar[str] = "_megatron_memory.MegatronMemory"
    LAYOUT: ClassVar[str] = "_megatron_stages.problems"
    LIMITS: ClassVar[Limits] = {"virtual_stages": {"ge": 1}}
    ON_RESUME: ClassVar[dict[str, str]] = {"virtual_stages": "safe", "recompute": "safe"}
    DEVICES: ClassVar[tuple[str, ...]] = ("cuda",)
    FAMILIES: ClassVar[tuple[str, ...]] = (
        "llama", "qwen3", "mistral", "qwen2", "mixtral", "qwen2_moe", "qwen3_moe",
    )  # fmt: skip
    """The families for which every number has been compared with transformers'."""

    dtype: ComputeDtype = "auto"
    """dtype of parameters and products: float32, or bfloat16 with float32 copies in the optimizer.
    auto: bfloat16 if the GPU multiplies it."""

    virtual_stages: int = 1
    """Number of groups of consecutive layers on each pipeline stage. With several, a micro-batch
    passes through all stages once for each group, so stages idle less but send more. Needs
    `mesh.pp`; must divide the number of layers of a stage."""

    recompute: Recomputation = "full"
    """What `gradient_checkpointing` recomputes. full: whole layers, from their inputs. selective:
    attention and the MLP or the experts, from the inputs of each; less is recomputed, but norms,
    queries, keys and values stay in memory."""

    sequence_parallel: bool = False
    """Divide norms and dropout along the sequence. Not available yet, because it has not been
    tested on a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_megatron(self)

    def _initialize(self, model: Model) -> Model:
        if model.device.type != "cuda":
            raise ResourceError(
                (
                    f"the megatron backend of role {model.name} needs a CUDA device, "
                    f"not {model.device.type}"
                ),
                hint=f"set models.{model.name}.backend.type=fsdp to train without a GPU",
                code="R50",
            )
        with warnings.catch_warnings():
            # it warns about missing Transformer Engine and Apex
            warnings.simplefilter("ignore", UserWarning)
            from ._megatron_engine import MegatronEngine

        model.module = MegatronEngine(model, self)
        return model
