"""PyTorch FSDP2: parameters, gradients and optimizer state sharded over the data-parallel ranks.

On one rank the model stays as it is. Parameters and optimizer state are float32, matrix products run in `dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from rlcli.api.data import SequenceSample
from rlcli.api.engine_loop import TrainLoop
from rlcli.api.model import EngineState, Model, ModelBackend, ModelOutput, PipelinableEngine, register_backend

from ._engine import TransformersEngine
from ._recomputation import RecomputedLayers
from ._settings import TransformersTraining
from ._unsharded import UnshardedCopy

T = TypeVar("T")


@register_backend("fsdp")
@dataclass(frozen=True, kw_only=True)
class FSDP(TransformersTraining, ModelBackend):
    """Trains a transformers model on one rank or many."""

    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp",)
    MEMORY: ClassVar[str] = "_fsdp_memory.FSDPMemory"

    def _initialize(self, model: Model) -> Model:
        model.module = FSDPEngine(model, self)
        return model


class FSDPEngine(TransformersEngine, TrainLoop, PipelinableEngine):
    """A transformers model with AdamW, sharded when its mesh has more than one data-parallel rank."""

    def __init__(self, model: Model, settings: FSDP):
        self.settings = settings
        super().__init__(model, settings.dtype, settings.kv_cache_tokens)
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 1
        self.parameters = [p for p in self.lm.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(settings.groups(self.parameters), **settings.adamw(), fused=not self.sharded)

    def _lay_out(self, model: Model) -> None:
        self._recomputed = RecomputedLayers(self.lm) if self.settings.gradient_checkpointing else None
        self.sharded = self.dp_size > 1
        if self.sharded:
            assert model.source is not None
            self._shard(model.device_mesh["dp"])
            self._copy = UnshardedCopy(model.source, self.packed.compute_dtype)

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
        with self._recomputed.in_training_mode() if self._recomputed else nullcontext():
            return super().forward_micro_batch(micro_batch, then)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def lr_scheduler_step(self, version_steps: int) -> float:
        rate = self.settings.rate(version_steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def optimizer_step(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(value):
            self.optimizer.step()
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

    def _make_room(self) -> None:
        """AdamW makes its tensors in its first step; these are the same, before it."""
        for parameter in self.parameters:
            if parameter not in self.optimizer.state:
                steps = torch.zeros((), dtype=torch.float32, device=self.device if not self.sharded else "cpu")
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": steps, **moments}

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        for held in self.optimizer.state.values():
            held.update({moment: tensor.to(device) for moment, tensor in held.items() if tensor.dim()})

    # -- whole parameters ------------------------------------------------------------------------------------

    @contextmanager
    def generator(self) -> Iterator[nn.Module]:
        """Sharded parameters are gathered into a copy for the duration of a call, not once per token."""
        if not self.sharded:
            with super().generator() as lm:
                yield lm
            return
        self._onload()
        with self._copy.of(self.whole_parameters()) as lm:
            yield lm
