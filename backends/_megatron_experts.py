"""A mixture of experts in a block of Megatron-Core, and the losses of its router.

Megatron's own layer requires sequence parallelism where there is tensor parallelism, takes
auxiliary losses over single micro-batches, and keeps every expert in a parameter of its own. Here,
experts are stacked as in transformers' modules, tensor-parallel ranks divide each, and tokens are
sent to the ranks that have their experts, as with `fsdp` (`_expert_parallel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn.functional import grouped_mm, linear

from rlcli.api.family import Experts, ModelConfig
from rlcli.errors import ModelError

from ._expert_parallel import through_experts
from ._megatron_groups import RoleGroups
from ._routers import RoutedStep, balance_factors
from ._routing_replay import FREE
from ._settings import RouterLosses

PADDING = -2
"""In place of an expert: the router chooses, and neither its losses nor its load count it."""


class RoutedMLP(nn.Module):
    """In the place of a block's MLP: each token goes through the experts that the router chooses,
    and through the shared one, if there is one."""

    def __init__(
        self,
        config: TransformerConfig,
        experts: Experts,
        groups: RoleGroups,
        routers: StageRouters,
        layer: int,
    ):
        """`layer` counts from 0, over all stages."""
        super().__init__()
        self._experts = experts
        self._groups = groups
        self._routers = routers
        self._layer = layer
        self._activation: Any = config.activation_func
        hidden, dtype = config.hidden_size, config.params_dtype
        self.router = nn.Linear(hidden, experts.count, bias=False, dtype=dtype)
        self.experts = _stack(hidden, experts, groups, dtype)
        if experts.shared:
            self.shared_router = nn.Linear(hidden, 1, bias=False, dtype=dtype)
            self.shared_expert = _shared_expert(config, experts.shared, groups.tp)

    def forward(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """[S, 1, H], and no bias. In the place of Megatron's `padding_mask` are routes [S, L, k]
        (see `StageRouters.routes`)."""
        rows = hidden_states[:, 0]
        weights, chosen = self._choice(rows, self._routers.of_layer(padding_mask, self._layer))
        tp, ep = self._groups.tp, self._groups.ep
        inputs, factors = (copy_to_tensor_model_parallel_region(x, tp) for x in (rows, weights))
        partial = through_experts(inputs, chosen, factors, self._experts.count, ep, self._compute)
        routed = reduce_from_tensor_model_parallel_region(partial, tp)[:, None]
        if self._experts.shared:
            common, _ = self.shared_expert(hidden_states)
            routed = routed + self.shared_router(hidden_states).sigmoid() * common
        return routed, None

    def _choice(
        self, rows: torch.Tensor, routes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, k] the weights of the experts that each token goes through, and their numbers, for
        the routes [S, k] of this layer."""
        logits = linear(rows.float(), self.router.weight.float())
        logits = self._routers.watched(logits, self._layer, routes)
        scores = logits.softmax(-1)
        chosen = chosen_experts(scores, routes)
        weights = scores.gather(-1, chosen)
        if self._experts.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def _compute(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """[R, H] this rank's part of the outputs of its experts number `experts` [R]."""
        stack: Any = self.experts
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=len(stack.down_proj))
        gate, up = _products(rows[order], stack.gate_up_proj, counts).chunk(2, -1)
        outputs = _products(self._activation(gate) * up, stack.down_proj, counts)
        return outputs[order.argsort()]


def _stack(hidden: int, experts: Experts, groups: RoleGroups, dtype: torch.dtype) -> nn.Module:
    """This rank's experts, and this rank's part of each."""
    stack = nn.Module()
    count, width = experts.count // groups.ep.size(), experts.width // groups.tp.size()
    shapes = {"gate_up_proj": (count, 2 * width, hidden), "down_proj": (count, hidden, width)}
    for name, shape in shapes.items():
        parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype))
        parameter.allreduce = groups.ep.size() == 1  # else Megatron reduces it over expert_dp
        stack.register_parameter(name, parameter)
    return stack


def routed_mlp(
    experts: Experts, groups: RoleGroups, routers: StageRouters, layer: int
) -> type[RoutedMLP]:
    """The class of a block's MLP: Megatron calls it with its own configuration alone."""

    class OfLayer(RoutedMLP):
        def __init__(self, config: TransformerConfig):
            super().__init__(config, experts, groups, routers, layer)

    return OfLayer


def _products(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[R, out] for rows [R, in], the first `counts[0]` times the first of the matrices
    [E, out, in], and so on."""
    if rows.is_cuda and rows.dtype is torch.bfloat16:
        ends = counts.cumsum(0).to(torch.int32)
        return grouped_mm(rows, matrices.transpose(-1, -2), offs=ends)
    parts = rows.split(counts.tolist())
    return torch.cat([linear(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])


def chosen_experts(scores: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
    """[S, k] those with the highest scores [S, E], except where routes [S, k] prescribe others."""
    return scores.topk(routes.shape[-1], -1).indices.where(routes < 0, routes)


def _shared_expert(config: TransformerConfig, width: int, group: dist.ProcessGroup) -> MLP:
    modules = LocalSpecProvider()
    parts = MLPSubmodules(
        linear_fc1=modules.column_parallel_linear(), linear_fc2=modules.row_parallel_linear()
    )
    config = copy(config)
    config.ffn_hidden_size = width  # which the second of its layers takes
    return MLP(config, parts, ffn_hidden_size=width, tp_group=group)


class StageRouters:
    """The routers of a rank's blocks: what they are trained for, and what they do in a step.

    Recomputed blocks and pipelines leave no place where the logits of all layers meet, so a layer
    adds the gradient of its own losses. See `_routers` for their formulas.
    """

    def __init__(self, experts: Experts, settings: RouterLosses):
        coefficients = settings.router_aux_loss_coef, settings.router_z_loss_coef
        self.per_token = experts.per_token
        self.is_measured = coefficients != (None, None)
        self.aux_coef, self.z_coef = (coefficient or 0.0 for coefficient in coefficients)
        self._index = {layer: index for index, layer in enumerate(experts.layers)}
        self._experts = experts.count
        self._is_counting = False
        self._is_in_pass = False
        self._tokens: torch.Tensor | None = None
        self._factors: torch.Tensor | None = None
        self._sums = torch.zeros(0)

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[None]:
        """Passes whose tokens are counted from 0."""
        shape = (len(self._index), 2 * self._experts + 2)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    @contextmanager
    def training(self, step: RoutedStep, device: torch.device) -> Iterator[None]:
        """The same for passes with losses."""
        self._tokens = step.tokens
        if step.load is not None:
            self._factors = self.aux_coef * balance_factors(step.load, step.tokens)
        try:
            with self.counting(device):
                yield
        finally:
            self._tokens = self._factors = None

    def sums(self, groups: RoleGroups) -> torch.Tensor:
        """[L, 2 E + 2] over the micro-batches of all ranks: tokens that choose each expert,
        probabilities, squares of logsumexp, entropies. All ranks of the role call this."""
        total = self._sums.clone()
        for group in (groups.pp, groups.dp_cp):
            if group.size() > 1:
                dist.all_reduce(total, group=group)
        return total

    def load(self, groups: RoleGroups) -> torch.Tensor:
        """[L, E] tokens that choose each expert. All ranks of the role call this."""
        return self.sums(groups)[:, : self._experts]

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Layers that a backward pass recomputes are outside it, and count once."""
        self._is_in_pass = self._is_counting
        try:
            yield
        finally:
            self._is_in_pass = False

    def routes(self, prescribed: torch.Tensor | None, is_padding: torch.Tensor) -> torch.Tensor:
        """[S, L, k] the experts that are prescribed for the slots of a micro-batch (None: for none
        of them), `FREE` where a router chooses, `PADDING` where it does and that does not count."""
        if prescribed is None:
            shape = len(is_padding), len(self._index), self.per_token
            prescribed = is_padding.new_full((1, 1, 1), FREE, dtype=torch.int64).expand(shape)
        return prescribed.masked_fill(is_padding[:, None, None], PADDING)

    def of_layer(self, routes: torch.Tensor, layer: int) -> torch.Tensor:
        """[S, k] of routes [S, L, k]."""
        return routes[:, self._index[layer]]

    def watched(self, logits: torch.Tensor, layer: int, routes: torch.Tensor) -> torch.Tensor:
        """The logits [S, E] of a layer, whose gradient includes that of the router's losses."""
        index = self._index[layer]
        counting = routes[:, 0] != PADDING
        if self._is_in_pass:
            self._sums[index] += self._measured(logits.detach()[counting], routes[counting])
        if self._tokens is None or not torch.is_grad_enabled():
            return logits
        return _WithLoss.apply(logits, self._loss(logits[counting], index))

    def _loss(self, logits: torch.Tensor, index: int) -> torch.Tensor:
        """What a layer's tokens contribute to the losses of the step, a scalar."""
        assert self._tokens is not None
        squares = logits.logsumexp(-1).square().sum()
        total = self.z_coef * squares / (len(self._index) * self._tokens)
        if self._factors is not None:
            total = total + (self._factors[index] * logits.softmax(-1).sum(0)).sum()
        return total.to(logits.dtype)

    def _measured(self, logits: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        """[2 E + 2] sums over tokens."""
        probabilities = logits.softmax(-1)
        chosen = chosen_experts(probabilities, routes)
        counts = chosen.flatten().bincount(minlength=self._experts)
        squares = logits.logsumexp(-1).square().sum()[None]
        entropies = torch.special.entr(probabilities).sum()[None]
        parts = (counts, probabilities.sum(0), squares, entropies)
        return torch.cat([part.double() for part in parts])


class _WithLoss(torch.autograd.Function):
    """The logits, as they are; the backward pass begins with 1 at the loss as well."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss_is_like = loss.new_ones(())
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, ctx.loss_is_like


def stage_routers(role: str, config: ModelConfig, settings: RouterLosses) -> StageRouters | None:
    """Raises ModelError if losses of routers are set for a model without routers."""
    if config.experts is not None:
        return StageRouters(config.experts, settings)
    if (settings.router_aux_loss_coef, settings.router_z_loss_coef) != (None, None):
        raise ModelError(
            f"the {config.family} of role {role} has no routers that can be balanced",
            hint=f"leave out router_… in models.{role}.backend.args",
        )
    return None
