"""PyTorch FSDP2 and tensor parallelism: parameters, gradients and optimizer state sharded over a
role's ranks.

Data-parallel ranks gather one block at a time (`_sharding`), tensor-parallel ranks keep their heads
and columns (`_tensor_parallel`); with both, each gathers from the ranks that have the same columns.
With ep, tokens are sent to the ranks that have their experts (`_expert_parallel`). Context-parallel
ranks share the tokens of a micro-batch (`_context_parallel`), and the parameters, as data-parallel
ones do. On one rank, the model is not sharded. Parameters and optimizer state are float32, matrix
products run in `dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from rlcli.api.engine import Hook
from rlcli.api.limits import Limits
from rlcli.api.micro_batches import MicroBatch
from rlcli.api.model import EngineState, Model, ModelBackend, PipelinableEngine, register_backend

from ._engine import TransformersEngine
from ._muon import Muon
from ._recomputation import recomputed_layers
from ._routed_training import RoutedTraining, routers_of
from ._settings import ContextParallelism, OptimizerChoice, TransformersTraining
from ._sharding import (
    clip_gradients,
    expert_mesh,
    forget_gradients,
    grouped_by_mesh,
    shard,
    shard_experts,
    sharding_mesh,
)
from ._transformers import dimensions_in, hidden_matrices

T = TypeVar("T")


@register_backend("fsdp")
@dataclass(frozen=True, kw_only=True)
class FSDP(OptimizerChoice, ContextParallelism, TransformersTraining, ModelBackend):
    """Trains a transformers model on one rank or many."""

    ELSEWHERE: ClassVar[str] = "ddp zero accelerate torchtitan automodel"
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp", "tp", "cp", "ep")
    ROUTING_REPLAY: ClassVar[bool] = True
    LAYOUT: ClassVar[str] = "_layouts.problems"
    WHOLE_SEQUENCES: ClassVar[str] = "_layouts.whole_sequences"
    MEMORY: ClassVar[str] = "_fsdp_memory.FSDPMemory"
    LIMITS: ClassVar[Limits] = {"shard_size": {"ge": 2}}
    ON_RESUME: ClassVar[dict[str, str]] = {"shard_size": "safe", "defer_reduction": "safe"}

    shard_size: int | None = None
    """Number of data- and context-parallel ranks that share one copy of the model (hybrid
    sharding). Each group of this many neighbours, such as the devices of a node, holds a copy; the
    groups exchange gradients once per step. null, or no less than the number of ranks: one copy."""

    defer_reduction: bool = False
    """Reduce gradients once per step instead of after each micro-batch. Less is sent, but until the
    last micro-batch every rank holds gradients of the whole model (with tp, of its part of it) in
    float32."""

    def _initialize(self, model: Model) -> Model:
        model.module = FSDPEngine(model, self)
        return model


class FSDPEngine(TransformersEngine, RoutedTraining, PipelinableEngine):
    """A transformers model with its optimizers, sharded when its mesh has more than one data- or
    context-parallel rank."""

    def __init__(self, model: Model, settings: FSDP):
        self.settings = settings
        super().__init__(model, settings)
        self.routers = routers_of(self.lm, self.role, settings)
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 1
        self._is_in_step = False
        self.parameters = [p for p in self.lm.parameters() if p.requires_grad]
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW, and Muon for the matrices of layers if it is chosen."""
        settings = self.settings
        by_muon = set(hidden_matrices(self.lm)) if settings.optimizer == "muon" else set()
        others = [p for p in self.parameters if p not in by_muon]
        dim = dimensions_in(self.lm)
        groups = [
            group
            for parameters in grouped_by_mesh(others)
            for group in settings.groups(parameters, dim)
        ]
        adamw = torch.optim.AdamW(groups, **settings.adamw(), fused=True)
        matrices = settings.groups(p for p in self.parameters if p in by_muon)
        if not matrices:
            return [adamw]
        dtype = self.packed.compute_dtype
        return [adamw, Muon(matrices, lr=settings.lr, momentum=settings.momentum, dtype=dtype)]

    def _lay_out(self, model: Model) -> None:
        self._recomputed = recomputed_layers(self.lm, self.settings)
        if not self.is_sharded:
            return
        if model.expert_ranks > 1:
            from ._expert_parallel import distribute_experts

            experts = expert_mesh(self._mesh, model.expert_ranks)
            stacks = distribute_experts(self.lm, experts["ep"], self.role)
            shard_experts(stacks, experts["dp_experts"])
        shard(self.packed, sharding_mesh(self._mesh, self.settings.shard_size, self.role))

    @property
    def is_sharded(self) -> bool:
        return self.dp_size > 1 or self._context_group is not None

    # -- training ----------------------------------------------------------------------------------

    def _in_pass(self) -> AbstractContextManager[None]:
        self._is_in_step = self._is_in_step or torch.is_grad_enabled()
        return self._recomputed.in_training_mode() if self._recomputed else nullcontext()

    def forward_batch(self, micro_batches: Sequence[MicroBatch], hook: Hook[T]) -> list[T]:
        outputs = super().forward_batch(micro_batches, hook)
        if isinstance(self.packed, FSDPModule):
            self.packed.reshard()  # embedding and head would stay gathered until a backward pass
        return outputs

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        if isinstance(self.packed, FSDPModule):
            if self.settings.defer_reduction:
                self.packed.set_requires_gradient_sync(is_last)
            else:  # replicas sum gradients that are already sharded
                self.packed.set_requires_all_reduce(is_last)
        loss.backward()
        self._is_in_step = not is_last

    def optimizer_zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._is_in_step and isinstance(self.packed, FSDPModule):
            forget_gradients(self.packed)
        self._is_in_step = False

    def lr_scheduler_step(self, version_steps: int) -> float:
        rate = self.settings.rate(version_steps, self.total_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        return rate

    def optimizer_step(self) -> float:
        value = clip_gradients(self.parameters, self.settings.max_grad_norm)
        if math.isfinite(value):
            self._move_optimizer(self._device)
            for optimizer in self.optimizers:
                optimizer.step()
        self.optimizer_zero_grad()
        return value

    # -- state -------------------------------------------------------------------------------------

    def state(self, room_for_optimizer: bool = False) -> EngineState:
        if room_for_optimizer or self.optimizers[0].state:
            self._make_room()
        names = {parameter: name for name, parameter in self.lm.named_parameters()}
        moments = {
            f"{names[parameter]}/{moment}": tensor
            for optimizer in self.optimizers
            for parameter, state in optimizer.state.items()
            for moment, tensor in state.items()
        }
        return EngineState(self.named_weights(), moments)

    def _make_room(self) -> None:
        """Create the tensors that optimizers would create in their first step, before it, or for
        parameters that have had no gradient, such as those of images: a state has them all."""
        adamw, *others = self.optimizers
        for group in adamw.param_groups:
            for parameter in group["params"]:
                if parameter not in adamw.state:
                    adamw.state[parameter] = self._moments(parameter)
        for muon in others:
            assert isinstance(muon, Muon)
            muon.make_state()

    def _moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Those of AdamW."""
        steps = torch.zeros((), dtype=torch.float32, device=self.device)
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": steps, **moments}

    def offload(self) -> None:
        """Weights are restored by the next forward pass, the optimizer's state by the next step."""
        super().offload()
        self._move_optimizer(torch.device("cpu"))

    def _move_optimizer(self, device: torch.device) -> None:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                state.update(
                    {moment: tensor.to(device) for moment, tensor in state.items() if tensor.dim()}
                )
