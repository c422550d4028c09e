"""Megatron-Core's distributed optimizer: every data-parallel rank keeps the state of its share of
the gradient buffer.

Such a share is a flat range of numbers without rows; tensors that go into or out of the optimizer
have the shape of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from ._megatron_groups import RoleGroups
from ._megatron_model import StageModel
from ._settings import AdamWSettings

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The optimizer's state for each number of a trained parameter."""
_MASTER = "master"
"""The float32 copy of a bfloat16 parameter, which is what is trained."""


def data_parallel(model: StageModel, groups: RoleGroups) -> DistributedDataParallel:
    """The chunk with one buffer of float32 gradients, summed over data-parallel ranks when a step
    is complete."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    return DistributedDataParallel(model.config, settings, model, pg_collection=groups.collection())


def reduce_gradients(model: list[Any], num_tokens: Any = None, **others: Any) -> None:
    """Sum over ranks, also over stages that share the embedding;
    never divide by a number of tokens."""
    finalize_model_grads(model, None, **others)


def _buffers(chunks: Sequence[DistributedDataParallel]) -> list[Any]:
    """The buffers of all parameters; Megatron keeps divided experts apart."""
    return [
        buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


class ShardedAdamW:
    """AdamW over the shares of this rank."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        settings: AdamWSettings,
        groups: RoleGroups,
    ):
        self.chunks = chunks
        self.settings = settings
        self.groups = groups
        parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        bf16 = parameters[0].dtype is torch.bfloat16
        adamw = torch.optim.AdamW(settings.groups(parameters), **settings.adamw())
        config = OptimizerConfig(
            lr=settings.lr,
            clip_grad=settings.max_grad_norm,
            bf16=bf16,
            params_dtype=parameters[0].dtype,
            use_distributed_optimizer=True,
        )
        # Megatron's own optimizer factory involves all ranks of the world,
        # including those of other roles.
        self.optimizer = DistributedOptimizer(
            adamw,
            config,
            None,
            None,
            list(chunks),
            # it refuses several of one dtype in a list
            {number: [buffer] for number, buffer in enumerate(_buffers(chunks))},
            groups.dp_cp,
            None,
            groups.model.rank(),
            0,
        )
        self.optimizer.grad_stats_parallel_group = groups.all
        self.optimizer.tp_group = groups.tp
        self.steps: int | None = None
        """Number of steps done; None before the first. (torch counts them in every share, and a
        rank may have none.)"""

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self) -> float:
        """Apply the gradients if their norm is finite; returns it."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            clip_grad_by_total_norm_fp32(
                self.optimizer.get_parameters(), self.settings.max_grad_norm, norm
            )
            self.optimizer.step_with_ready_grads()
            self.steps = (self.steps or 0) + 1
        self.zero_grad()
        return norm

    # -- state in the shape of parameters ----------------------------------------------------------

    def weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """The trained values, float32: the parameter, or what it is rounded from. All data-parallel
        ranks call this."""
        is_whole = parameter.dtype is torch.float32 or not parameter.requires_grad
        return parameter.detach().float() if is_whole else self.gathered(parameter, _MASTER)

    def set_weight(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        """Continue training from `weight`, float32 in the parameter's shape."""
        parameter.detach().copy_(weight)
        if parameter.dtype is not torch.float32:
            self.scatter(parameter, _MASTER, weight)

    def gradient_buffers(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in _buffers(self.chunks)]

    def kept_tensors(self) -> Iterator[torch.Tensor]:
        """Everything that an update needs on this rank besides weights and gradients."""
        for parameter, share, _ in self._shares():
            if parameter.dtype is not torch.float32:
                yield share
            yield from (
                tensor
                for tensor in self.optimizer.optimizer.state.get(share, {}).values()
                if tensor.dim()
            )

    def make_room(self) -> None:
        """Create the tensors that AdamW would create in its first step, before it."""
        for _, share, _ in self._shares():
            state = self.optimizer.optimizer.state[share]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state.update({moment: torch.zeros_like(share) for moment in MOMENTS})
        self.steps = self.steps or 0

    def set_steps(self, steps: int) -> None:
        self.steps = steps
        for _, share, _ in self._shares():
            self.optimizer.optimizer.state[share]["step"].fill_(steps)

    def gathered(self, parameter: nn.Parameter, name: str) -> torch.Tensor:
        """A parameter's state of that name, in the parameter's shape.
        All data-parallel ranks call this."""
        values = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        located = self._find(parameter)
        if located is not None:
            share, first = located
            values[first : first + share.numel()] = self._kept(share, name)
        has_all = getattr(parameter, "allreduce", True)
        sharers = self.groups.dp_cp if has_all else self.groups.expert_dp
        if sharers.size() > 1:  # each number is on one rank; the others have 0
            dist.all_reduce(values, group=sharers)
        return values.view(parameter.shape)

    def scatter(self, parameter: nn.Parameter, name: str, values: torch.Tensor) -> None:
        """Store this rank's share of `values`, the inverse of `gathered`."""
        located = self._find(parameter)
        if located is not None:
            share, first = located
            self._kept(share, name).copy_(values.reshape(-1)[first : first + share.numel()])

    def _kept(self, share: torch.Tensor, name: str) -> torch.Tensor:
        return share.detach() if name == _MASTER else self.optimizer.optimizer.state[share][name]

    def _find(self, parameter: nn.Parameter) -> tuple[torch.Tensor, int] | None:
        return next(
            ((share, first) for owner, share, first in self._shares() if owner is parameter), None
        )

    def _shares(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, int]]:
        """Each parameter that this rank has a share of, the share,
        and where it begins in the parameter."""
        optimizer: Any = self.optimizer
        pairs = (
            *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
            *zip(
                optimizer.model_float16_groups,
                optimizer.shard_fp32_from_float16_groups,
                strict=True,
            ),
        )
        for owners, shares in pairs:
            for owner, share in zip(owners, shares, strict=True):
                yield owner, share, optimizer._get_model_param_range_map(owner)["param"].start
