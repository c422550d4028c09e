"""Expert parallelism: ranks hold different experts of a layer, and tokens are sent to the ones that
they are routed to.

Expert-parallel ranks are neighbours among the data- and context-parallel ones, so ep divides their
number, and each has its own tokens (GShard, https://arxiv.org/abs/2006.16668). Experts are divided
by number among the ep ranks; what one of these holds is sharded by FSDP2 over the ranks that hold
the same. All other parameters are sharded over all data- and context-parallel ranks. An expert's
gradient thus comes from the tokens of all ranks, without any collective except those of FSDP2 and
the return of the tokens.

Tokens are exchanged by all-to-all with uneven splits: experts take all tokens that choose them, and
none is dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from rlcli.errors import ModelError

from ._tensor_parallel import local


def distribute_experts(lm: Any, mesh: Any, role: str) -> list[nn.Module]:
    """Divide the experts of `lm`, which is on the meta device, among the ranks of a one-dimensional
    mesh, and send tokens to them; returns the modules that hold all experts of a layer, each
    parameter [E, …]. Raises ModelError if that is impossible."""
    stacks: list[Any] = [module for module in lm.modules() if _is_stack(module)]
    kind = lm.config.model_type
    if not stacks:
        raise _cannot_divide(role, f"the {kind} of role {role} has no experts to divide")
    _check_takes_choices(stacks, kind, role)
    for stack in stacks:
        if stack.num_experts % mesh.size():
            message = f"the {stack.num_experts} experts of role {role} cannot be divided"
            raise _cannot_divide(role, f"{message} among {mesh.size()} ranks")
        for name, parameter in list(stack.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            stack.register_parameter(name, nn.Parameter(spread, parameter.requires_grad))
        _DividedExperts(stack, mesh.get_group()).install()
    return stacks


def _is_stack(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    stacked = [parameter.dim() == 3 and parameter.shape[0] == count for parameter in parameters]
    return bool(stacked) and all(stacked)


def _check_takes_choices(stacks: list[Any], kind: str, role: str) -> None:
    """Check that forward passes take hidden states, the chosen experts, and their weights. Raises
    ModelError."""
    try:
        for stack in stacks:
            inspect.signature(stack.forward).bind(None, None, None)
    except TypeError:
        message = f"the experts of the {kind} of role {role} cannot be divided: they do not take"
        hint = f"set models.{role}.mesh.ep=1"
        raise ModelError(f"{message} the numbers that tokens have chosen", hint=hint) from None


def _cannot_divide(role: str, message: str) -> ModelError:
    return ModelError(message, hint=f"set models.{role}.mesh.ep=1, or a divisor of their number")


ComputeExperts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The outputs [R, H] of rows [R, H], given the number on this rank of the expert of each [R]."""


def through_experts(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    count: int,
    group: dist.ProcessGroup,
    compute: ComputeExperts,
) -> torch.Tensor:
    """[T, H] the sums over the experts that tokens [T, H] have chosen [T, k], times weights [T, k].
    The `count` experts are divided among the ranks of the group, which all call this."""
    tokens, per_token = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=count)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    # [rank, expert there] and [rank, expert here]
    sent, received = (n.view(group.size(), -1) for n in (counts, arriving))
    splits = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived = _Exchange.apply(hidden[order // per_token], *splits, group)
    outputs = _compute_received(arrived, received, compute)
    returned = _Exchange.apply(outputs, *reversed(splits), group)
    of_each_token = returned[order.argsort()].view(tokens, per_token, -1)
    return (of_each_token * weights[..., None]).sum(1).to(hidden.dtype)


def _compute_received(
    rows: torch.Tensor, received: torch.Tensor, compute: ComputeExperts
) -> torch.Tensor:
    """The outputs [R, H] of this rank's experts for rows [R, H], which come rank by rank and from
    each expert by expert."""
    numbers = torch.arange(received.shape[1], device=rows.device).repeat(len(received))
    experts = numbers.repeat_interleave(received.flatten())
    count = len(rows)
    if count == 0:  # all ranks reduce gradients of their experts, and send some back
        rows = torch.cat((rows, rows.new_zeros((1, rows.shape[1]))))
        experts = experts.new_zeros(1)
    return compute(rows, experts)[:count]


class _DividedExperts:
    """The forward pass of a stack of which each rank holds a part."""

    def __init__(self, stack: Any, group: dist.ProcessGroup):
        self._stack = stack
        self._group = group
        self._experts: int = stack.num_experts
        self._compute: Callable[..., torch.Tensor] = stack.forward
        stack.num_experts //= group.size()

    def install(self) -> None:
        self._stack.forward = self.forward

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] the sums over the experts that tokens have chosen [T, k], times weights [T, k]."""
        return through_experts(
            hidden, chosen, weights, self._experts, self._group, self._compute_here
        )

    def _compute_here(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        with self._local_parameters():
            return self._compute(rows, experts[:, None], torch.ones_like(rows[:, :1]))

    @contextmanager
    def _local_parameters(self) -> Iterator[None]:
        spread = dict(self._stack._parameters)
        self._stack._parameters.update({name: local(p) for name, p in spread.items()})
        try:
            yield
        finally:
            self._stack._parameters.update(spread)


class _Exchange(torch.autograd.Function):
    """Send consecutive rows to each rank, and receive others; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (sent, received), group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        sent, received = ctx.splits
        return _exchanged(grad, received, sent, ctx.group), None, None, None


def _exchanged(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
