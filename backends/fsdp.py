"""PyTorch FSDP2: parameters, gradients and optimizer state sharded over the data-parallel ranks.

On one rank the model stays as it is. Parameters and optimizer state are float32, matrix products run in `dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from rlcli.api.data import SequenceSample
from rlcli.api.engine_loop import TrainLoop
from rlcli.api.limits import Limits, check_limits
from rlcli.api.model import (
    EngineState,
    ForwardEngine,
    Model,
    ModelBackend,
    ModelOutput,
    PipelinableEngine,
    register_backend,
)
from rlcli.ops.schedules import learning_rate

from ._engine import TransformersEngine, gathered

T = TypeVar("T")


@register_backend("fsdp")
@dataclass(frozen=True, kw_only=True)
class FSDP(ModelBackend):
    """Trains a transformers model on one rank or many."""

    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp",)
    LIMITS: ClassVar[Limits] = {
        "lr": {"ge": 0}, "weight_decay": {"ge": 0}, "beta1": {"ge": 0, "lt": 1}, "beta2": {"ge": 0, "lt": 1},
        "eps": {"ge": 0}, "warmup_steps": {"ge": 0}, "min_lr_ratio": {"ge": 0, "le": 1}, "max_grad_norm": {"gt": 0},
        "kv_cache_tokens": {"ge": 1},
    }  # fmt: skip

    lr: float = 1e-5
    """Peak learning rate of AdamW."""

    weight_decay: float = 0.05
    """Decoupled weight decay of matrices; biases and norms have none."""

    beta1: float = 0.9
    """Decay of AdamW's first moment."""

    beta2: float = 0.95
    """Decay of AdamW's second moment."""

    eps: float = 1e-5
    """Added to the square root of AdamW's second moment."""

    warmup_steps: int = 0
    """Training steps over which the learning rate rises from near 0."""

    schedule: str = "constant"
    """Learning rate after the warm-up: constant, linear or cosine."""

    min_lr_ratio: float = 0.0
    """What linear and cosine approach, as a share of the peak; they would reach it one step after the last."""

    max_grad_norm: float = 1.0
    """Gradients longer than this are scaled down to it."""

    dtype: str = "auto"
    """Of matrix products: float32, bfloat16, or auto (bfloat16 where the hardware has it)."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    kv_cache_tokens: int | None = None
    """Tokens, of prompts and responses, that a rank's KV cache has room for. Each response reserves the longest prompt
    and `max_new_tokens`; as many are decoded at once as fit. null: room for `max_concurrent_responses` of them."""

    def __post_init__(self) -> None:
        check_limits(self)
        learning_rate(0, peak=self.lr, total_steps=1, schedule=self.schedule)
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; it must be auto, float32 or bfloat16")

    def _initialize(self, model: Model) -> Model:
        model.module = FSDPEngine(model, self)
        return model


class FSDPEngine(TransformersEngine, TrainLoop, PipelinableEngine):
    """A transformers model with AdamW, sharded when its mesh has more than one data-parallel rank."""

    def __init__(self, model: Model, settings: FSDP):
        super().__init__(model, settings.dtype, settings.kv_cache_tokens)
        self.settings = settings
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 1
        self._recomputing: list[nn.Module] = []
        if settings.gradient_checkpointing:
            newest = getattr(self.lm, "activation_checkpointing_enable", None)  # its name since transformers 5.20
            (newest or self.lm.gradient_checkpointing_enable)({"use_reentrant": False})
            self._recomputing = [m for m in self.lm.modules() if getattr(m, "gradient_checkpointing", False)]
        self.sharded = self.dp_size > 1
        self._whole: nn.Module | None = None
        self._whole_is_current = False
        if self.sharded:
            self._shard(model.device_mesh["dp"])
        self.parameters = [p for p in self.lm.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
                {"params": [p for p in self.parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=not self.sharded,
        )

    def _shard(self, mesh: Any) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        blocks = set(self.lm._no_split_modules or ())
        for module in self.lm.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh)
        fully_shard(self.packed, mesh=mesh)
        for module in self.packed.modules():
            if isinstance(module, FSDPModule):
                # The loss is already divided by the global weight, so gradients are summed and divided by nothing.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    # -- training --------------------------------------------------------------------------------------------

    def forward_micro_batch(self, micro_batch: SequenceSample, then: Callable[[ModelOutput], T]) -> T:
        with self._recomputed():
            return super().forward_micro_batch(micro_batch, then)

    @contextmanager
    def _recomputed(self) -> Iterator[None]:
        """transformers recomputes the layers that are in training mode; dropout within them, or a generation without
        its cache, would be the price of leaving them there."""
        for module in self._recomputing:
            module.training = torch.is_grad_enabled()
        try:
            yield
        finally:
            for module in self._recomputing:
                module.training = False

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def lr_scheduler_step(self, version_steps: int) -> float:
        settings = self.settings
        rate = learning_rate(
            version_steps, peak=settings.lr, total_steps=self.total_steps, warmup_steps=settings.warmup_steps,
            schedule=settings.schedule, floor=settings.min_lr_ratio,
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def optimizer_step(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(value):
            self.optimizer.step()
            self._whole_is_current = False
        self.optimizer_zero_grad()
        return value

    # -- state -----------------------------------------------------------------------------------------------

    def state(self, room_for_optimizer: bool = False) -> EngineState:
        if room_for_optimizer:
            self._make_room()
        names = {parameter: name for name, parameter in self.lm.named_parameters()}
        moments = {
            f"{names[parameter]}/{moment}": tensor
            for parameter, held in self.optimizer.state.items()
            for moment, tensor in held.items()
        }
        return EngineState(self.named_weights(), moments)

    def state_was_filled(self) -> None:
        self._whole_is_current = False

    def _make_room(self) -> None:
        """AdamW makes its tensors in its first step; these are the same, before it."""
        for parameter in self.parameters:
            if parameter not in self.optimizer.state:
                steps = torch.zeros((), dtype=torch.float32, device=self.device if not self.sharded else "cpu")
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": steps, **moments}

    def offload(self) -> None:
        super().offload()
        self._whole, self._whole_is_current = None, False

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        for held in self.optimizer.state.values():
            held.update({moment: tensor.to(device) for moment, tensor in held.items() if tensor.dim()})

    def take_parameters(self, source: ForwardEngine, eta: float) -> None:
        super().take_parameters(source, eta)
        self._whole_is_current = False

    # -- whole parameters ------------------------------------------------------------------------------------

    def generator(self) -> nn.Module:
        """Sharded parameters are gathered into a copy once per version, not once per token."""
        if not self.sharded:
            return super().generator()
        if self._whole is None:
            # Its parameters may have gradients, though they never do: autocast keeps the casts of such ones only.
            self._whole = type(self.lm)(self.lm.config).to(self.device).eval()
        if not self._whole_is_current:
            whole = self._whole.state_dict()
            for name, tensor in self.lm.state_dict().items():
                whole[name].copy_(gathered(tensor))
            self._whole_is_current = True
        return self._whole
