"""Settings that several backends share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlcli.api.limits import ArgumentCheck, Limits, Needs, check_arguments
from rlcli.ops.attention import Kernels
from rlcli.ops.context_choice import Choice
from rlcli.ops.schedules import ScheduleName, learning_rate

if TYPE_CHECKING:
    from torch import nn

    from rlcli.api.model import Model

ComputeDtype = Literal["auto", "float32", "bfloat16"]
Recomputation = Literal["full", "selective"]


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW, its learning-rate schedule, and its gradient clipping."""

    FOLLOWS_LENGTH: ClassVar[dict[str, str]] = {"schedule": "constant"}
    LIMITS: ClassVar[Limits] = {
        "lr": {"ge": 0},
        "weight_decay": {"ge": 0},
        "beta1": {"ge": 0, "lt": 1},
        "beta2": {"ge": 0, "lt": 1},
        "eps": {"ge": 0},
        "warmup_steps": {"ge": 0},
        "min_lr_ratio": {"ge": 0, "le": 1},
        "max_grad_norm": {"gt": 0},
    }

    lr: float = 1e-5
    """Peak learning rate of AdamW."""

    weight_decay: float = 0.05
    """Decoupled weight decay of matrices; not applied to biases and norms."""

    beta1: float = 0.9
    """Decay of AdamW's first moment."""

    beta2: float = 0.95
    """Decay of AdamW's second moment."""

    eps: float = 1e-5
    """Added to the square root of AdamW's second moment."""

    warmup_steps: int = 0
    """Training steps over which the learning rate rises from near 0."""

    schedule: ScheduleName = "constant"
    """Learning rate after the warm-up."""

    min_lr_ratio: float = 0.0
    """The learning rate at which linear and cosine end, as a fraction of the peak; they would reach
    it one step after the last."""

    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to this norm."""

    def rate(self, version_steps: int, total_steps: int) -> float:
        """The learning rate of training step `version_steps` (from 0)."""
        return learning_rate(
            version_steps,
            peak=self.lr,
            total_steps=total_steps,
            warmup_steps=self.warmup_steps,
            schedule=self.schedule,
            floor=self.min_lr_ratio,
        )

    def groups(
        self,
        parameters: Iterable[nn.Parameter],
        dim: Callable[[nn.Parameter], int] = lambda parameter: parameter.dim(),
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: matrices, which decay, and vectors, which do not,
        without empty groups. `dim` returns a parameter's number of dimensions, in case a library
        has flattened the parameters."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        matrices = {"params": [p for p in trained if dim(p) > 1], "weight_decay": self.weight_decay}
        vectors = {"params": [p for p in trained if dim(p) <= 1], "weight_decay": 0.0}
        return [group for group in (matrices, vectors) if group["params"]]

    def adamw(self) -> dict[str, Any]:
        """The arguments of `torch.optim.AdamW` except the parameters."""
        return {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice:
    """Which optimizer trains the matrices of a model's layers."""

    LIMITS: ClassVar[Limits] = {"momentum": {"ge": 0, "lt": 1}}
    NEEDS: ClassVar[Needs] = {"momentum": "optimizer=muon"}
    ON_RESUME: ClassVar[dict[str, str]] = {"optimizer": "forbidden"}

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: the matrices of layers are updated by Muon, everything else (embeddings, head, norms,
    biases) by AdamW, with the same learning rates and weight decay. Less memory; each update takes
    time for the matrices of the whole model, on every rank."""

    momentum: float = 0.95
    """Decay of Muon's momentum."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision in which a model computes."""

    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = None
    MEASURED: ClassVar[tuple[str, ...]] = ("dtype",)

    dtype: ComputeDtype = "auto"
    """dtype of matrix products. auto: on GPUs bfloat16 if they multiply it; on a CPU what a
    measurement at the start of the run finds faster, float32 if the difference is small."""

    def __post_init__(self) -> None:
        check_arguments(self)

    def measure(self, model: Model) -> dict[str, dict[str, float]]:
        if self.dtype != "auto" or model.source is None:
            return {}
        from ._product_speed import seconds_by_dtype

        trains = isinstance(self, AdamWSettings)
        seconds = seconds_by_dtype(model.source.config, model.device, trains)
        return {"dtype": seconds} if seconds else {}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(AdamWSettings, Precision):
    """A model that is trained."""

    ON_RESUME: ClassVar[dict[str, str]] = {"gradient_checkpointing": "safe"}

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, and up to a third more time, see
    `recompute`."""


@dataclass(frozen=True, kw_only=True)
class TransformersSettings(Precision):
    """A transformers model that scores and generates."""

    LIMITS: ClassVar[Limits] = {"kv_cache_tokens": {"ge": 1}}
    NEEDS: ClassVar[Needs] = {"attention=flash": "dtype=auto|bfloat16"}
    ON_RESUME: ClassVar[dict[str, str]] = {
        "kv_cache_tokens": "safe",
        "attention": "safe",
        "share_prefixes": "safe",
    }
    UNIFORMS: ClassVar[str | None] = "_decoding_rows.uniforms"

    kv_cache_tokens: int | None = None
    """Capacity of a rank's KV cache, in tokens of prompts and responses. Each response reserves the
    longest prompt and `max_new_tokens`; as many as fit are decoded at once. null: room for
    `max_concurrent_responses` of them."""

    attention: Kernels = "auto"
    """Attention kernels for packed sequences on GPUs in 16 bits: those of torch, or of flash-attn
    (version 3 or 4 where it is installed for the GPU, else 2), which can also cap scores without
    storing them. auto: flash-attn if it can be imported, else torch."""

    share_prefixes: bool = True
    """Compute only once the tokens that several sequences of a micro-batch begin with, such as the
    prompt of a group, where this saves work: not for short prompts of long responses. Log-probs,
    values and gradients are the same up to rounding. Each sequence is computed as a whole with
    cp, router losses and replayed experts."""


@dataclass(frozen=True, kw_only=True)
class ContextParallelism:
    """A model whose ranks may share the tokens of a micro-batch (`mesh.cp`)."""

    ON_RESUME: ClassVar[dict[str, str]] = {"context_parallel": "safe"}

    context_parallel: Choice = "auto"
    """How the ranks of `mesh.cp` attend to each other's tokens. ulysses exchanges heads: each rank
    attends to whole sequences with its share of the heads, whose number cp must divide. ring passes
    keys and values from rank to rank: any number of heads. auto: ulysses, or ring where heads
    cannot be divided, or where it sends less and micro-batches are long enough to hide it."""


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """A model with a mixture of experts that trains its routers."""

    LIMITS: ClassVar[Limits] = {"router_aux_loss_coef": {"ge": 0}, "router_z_loss_coef": {"ge": 0}}

    router_aux_loss_coef: float | None = None
    """Coefficient of the loss that balances the experts of a mixture (Switch Transformers), taken
    over all tokens of an update. null: no such loss, whatever config.json says (transformers, too,
    adds it only if router logits are requested); 0: it is only measured. If a rank has several
    micro-batches, extra forward passes count the load of all but the first (with megatron, of all),
    which is about a third more work."""

    router_z_loss_coef: float | None = None
    """Coefficient of the loss that keeps the logits of routers small (ST-MoE's z-loss). null: no
    such loss; 0: it is only measured."""


@dataclass(frozen=True, kw_only=True)
class TransformersTraining(RouterLosses, TransformersSettings, TrainingSettings):
    """A transformers model that also trains."""

    NEEDS: ClassVar[Needs] = {
        "recompute": "gradient_checkpointing",
        "offload_activations": "gradient_checkpointing",
    }
    ON_RESUME: ClassVar[dict[str, str]] = {"recompute": "safe", "offload_activations": "safe"}

    recompute: Recomputation = "full"
    """What `gradient_checkpointing` recomputes. full: whole layers, from their inputs, for about a
    third more time. selective: all but the results of products with weights and of attention, for
    a few percent more; these stay in memory, about half of what there is without it."""

    offload_activations: bool = False
    """Keep the inputs of recomputed layers in host memory until the backward pass. On a CPU nothing
    changes."""
