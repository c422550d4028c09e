"""Tensor parallelism by the plan that comes with a transformers model:
every rank keeps its heads and columns.

Parameters become DTensors over the ranks of the mesh; modules compute with the local parts, and
ranks communicate where modules are entered and left (Megatron-LM, https://arxiv.org/abs/1909.08053,
section 3). Between blocks, all ranks hold the same hidden states. Embedding and head are sharded by
rows of the vocabulary; the head is only used through `rlcli.ops.logprobs`, so no rank ever sees the
logits of other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from rlcli.errors import ModelError
from rlcli.ops.vocabulary import VocabularyShard

from ._tensor_plan import check_sizes, styles_of


def parallelize(lm: nn.Module, mesh: Any, role: str) -> None:
    """Shard the parameters of `lm`, real or on the meta device,
    over the ranks of a one-dimensional mesh.

    Raises ModelError if the model has no plan, or one that does not fit its sizes or that rlcli
    does not support.
    """
    styles = styles_of(lm, role, _PARTS)
    check_sizes(lm, styles, mesh.size(), role)
    ranks = _Ranks(mesh.get_group())
    cut: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(lm.named_modules()):
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not parameters:
            continue
        parallel = _PARTS[styles.get(name, "replicate")](module, ranks)
        for key, parameter in parameters.items():
            if parameter not in cut:
                spread = distribute_tensor(
                    parameter.data, mesh, [parallel.placement(key)], src_data_rank=None
                )
                cut[parameter] = nn.Parameter(spread, parameter.requires_grad)
            module.register_parameter(key, cut[parameter])
        parallel.install()


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, to compute with; gradients flow."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def vocabulary_shard(weight: torch.Tensor) -> VocabularyShard | None:
    """The rows of the head that this rank holds; None if it holds all of them."""
    if not isinstance(weight, DTensor) or not weight.placements[0].is_shard(0):
        return None
    mesh, size = weight.device_mesh, weight.shape[0]
    first = min(size, mesh.get_local_rank() * -(-size // mesh.size()))
    return VocabularyShard(mesh.get_group(), first, size)


# -- parts of modules ------------------------------------------------------------------------------


@dataclass
class _Ranks:
    """The ranks that share a model, and their communication."""

    group: dist.ProcessGroup
    _entered: list[torch.Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.group.size()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, with a gradient that is summed over ranks.

        Modules that take the same tensor, as queries, keys and values do, share one sum.
        """
        if not torch.is_grad_enabled() or not x.requires_grad:
            return x
        if not self._entered or self._entered[0] is not x:
            self._entered = [x, _Enter.apply(x, self.group)]
        return self._entered[1]

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        self._entered = []
        return _Leave.apply(partial, self.group)

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, concatenated along the last dimension; all have the same size."""
        return _Gather.apply(shard, self.group)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the last dimension."""
        return _Split.apply(x, self.group)


class _Part:
    """How a module is divided: its part of each parameter, and what surrounds the computation.
    Here: not at all."""

    def __init__(self, module: Any, ranks: _Ranks):
        self.module = module
        self.ranks = ranks
        self.compute: Callable[..., Any] = module.forward

    def placement(self, parameter: str) -> Placement:
        return Replicate()

    def parameter(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that the module computes with."""
        return local(parameter)

    def before(self, x: Any) -> Any:
        return x

    def after(self, y: Any) -> Any:
        return y

    def install(self) -> None:
        @functools.wraps(self.compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            args = (*map(self.before, args[:1]), *args[1:])
            with self._local_parameters():
                y = self.compute(*args, **kwargs)
            return self.after(y)

        self.module.forward = forward

    @contextmanager
    def _local_parameters(self) -> Iterator[None]:
        spread = dict(self.module._parameters)
        local_parameters = {
            name: p if p is None else self.parameter(name, p) for name, p in spread.items()
        }
        self.module._parameters.update(local_parameters)
        try:
            yield
        finally:
            self.module._parameters.update(spread)


class _Norm(_Part):
    """A norm of each head, or an activation: every rank sees its own heads or columns, so the
    parameters' gradient is the sum over ranks."""

    def parameter(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        value = local(parameter)
        return (
            _Enter.apply(value, self.ranks.group)
            if torch.is_grad_enabled() and value.requires_grad
            else value
        )


class _Heads(_Part):
    """A norm with a row for each head: every rank has those of its own heads."""

    def placement(self, parameter: str) -> Placement:
        return Shard(0)


class _Columns(_Part):
    """A linear layer with its own share of the outputs."""

    def placement(self, parameter: str) -> Placement:
        return Shard(0)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.enter(x)


class _GatheredColumns(_Columns):
    """The same, with the outputs of all ranks gathered."""

    def after(self, y: torch.Tensor) -> torch.Tensor:
        return self.ranks.gather(y)


class _Rows(_Part):
    """A linear layer with its own share of the inputs: outputs are summed over ranks."""

    def placement(self, parameter: str) -> Placement:
        return Replicate() if parameter == "bias" else Shard(1)

    def parameter(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        # a bias is added once, at the end
        return None if name == "bias" else local(parameter)  # type: ignore[return-value]

    def after(self, y: torch.Tensor) -> torch.Tensor:
        total = self.ranks.leave(y)
        bias = self.module._parameters.get("bias")
        return total if bias is None else total + local(bias).to(total.dtype)


class _SplitRows(_Rows):
    """The same for an input that every rank holds whole."""

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.split(x)


class _Embedding(_Part):
    """Its own rows of the vocabulary: a token's vector comes from the rank that has it, and zeros
    from the others."""

    def __init__(self, module: Any, ranks: _Ranks):
        super().__init__(module, ranks)
        rows = -(-module.num_embeddings // ranks.size)
        self.first = ranks.group.rank() * rows
        self.count = max(0, min(rows, module.num_embeddings - self.first))
        padding = module.padding_idx
        if padding is not None:
            module.padding_idx = (
                padding - self.first if self.first <= padding < self.first + self.count else None
            )

    def placement(self, parameter: str) -> Placement:
        return Shard(0)

    def install(self) -> None:
        @functools.wraps(self.compute)
        def forward(tokens: torch.Tensor) -> torch.Tensor:
            is_ours = (tokens >= self.first) & (tokens < self.first + self.count)
            with self._local_parameters():
                vectors = self.compute(torch.where(is_ours, tokens - self.first, 0))
            return self.ranks.leave(vectors.masked_fill(~is_ours[..., None], 0.0))

        self.module.forward = forward


class _Head(_Part):
    """Its own rows of the vocabulary, used by `rlcli.ops.logprobs`."""

    def placement(self, parameter: str) -> Placement:
        return Shard(0)

    def install(self) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            raise ModelError(
                "logits are not available where tensor parallelism shards the vocabulary"
            )

        self.module.forward = forward


_PARTS: dict[str, type[_Part]] = {
    "replicate": _Part,
    "replicated_with_grad_allreduce": _Norm,
    "heads": _Heads,
    "colwise": _Columns,
    "colwise_gather_output": _GatheredColumns,
    "colwise_rep": _GatheredColumns,
    "rowwise": _Rows,
    "rowwise_rep": _SplitRows,
    "rowwise_split_input": _SplitRows,
    "embedding": _Embedding,
    "head": _Head,
}
"""Style in a plan → how such modules are divided; `heads`, `embedding` and `head` are ours."""


# -- collectives, each with the one that its gradient needs ----------------------------------------


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(partial, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(shard, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _own(grad, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _gathered(grad, ctx.group), None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [
        torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _own(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()
