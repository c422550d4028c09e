"""FSDP2 over a role's data-parallel ranks: all of them, or groups that each hold the whole model
(hybrid sharding)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.pytorch_utils import Conv1D

from rlcli.errors import ModelError

from ._layouts import rows_are_known
from ._tensor_parallel import local
from ._transformers import PackedModel

NORM_EPS = 1e-6
"""What torch adds to a norm before it divides by it."""


def sharding_mesh(mesh: Any, shard_size: int | None, role: str) -> Any:
    """The data-parallel and context-parallel ranks of a role's mesh, in one dimension; or
    (replicas, shards) with shards of `shard_size` ranks, which are neighbours. Every rank of the
    role calls it. Raises ModelError if the ranks cannot be divided."""
    ranks = mesh["dp"].size() * mesh["cp"].size()
    if shard_size is None or shard_size >= ranks:
        return mesh["dp"] if mesh["cp"].size() == 1 else mesh["dp", "cp"]._flatten("dp_cp")
    if ranks % shard_size:
        message = (
            f"shard_size is {shard_size}, which does not divide the {ranks} "
            f"data- and context-parallel ranks of role {role}"
        )
        raise ModelError(message, hint="choose a divisor, or leave it out")
    names = ("dp_replicate", "dp_shard", "tp")
    ranks_by_axis = mesh.mesh.view(ranks // shard_size, shard_size, mesh["tp"].size())
    return _mesh_of(ranks_by_axis, mesh.device_type, names)["dp_replicate", "dp_shard"]


def expert_mesh(mesh: Any, expert_ranks: int) -> Any:
    """The data- and context-parallel ranks of a role's mesh as (ranks with the same experts, ranks
    that share a copy of all experts), the latter neighbours. Every rank of the role calls it."""
    ranks_by_axis = mesh.mesh.view(-1, expert_ranks)
    return _mesh_of(ranks_by_axis, mesh.device_type, ("dp_experts", "ep"))


def _mesh_of(ranks_by_axis: torch.Tensor, device_type: str, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh with groups of its own, made by the ranks in it alone."""
    coordinates = (ranks_by_axis == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for axis in range(ranks_by_axis.dim()):
        index: list[Any] = [*coordinates]
        index[axis] = slice(None)
        groups.append(
            dist.new_group(ranks_by_axis[tuple(index)].tolist(), use_local_synchronization=True)
        )
    return DeviceMesh.from_group(groups, device_type, ranks_by_axis, mesh_dim_names=names)


def shard_experts(stacks: Iterable[nn.Module], mesh: Any) -> None:
    """Shard stacks of experts over the ranks that hold the same ones: whole experts if each rank
    gets equally many, else the rows or the columns of each, if they can be divided equally."""
    for stack in stacks:
        fully_shard(stack, mesh=mesh, shard_placement_fn=partial(_shard_of, mesh.size()))


def _shard_of(ranks: int, parameter: nn.Parameter) -> Shard:
    sizes = enumerate(local(parameter).shape)
    return Shard(next((axis for axis, size in sizes if size % ranks == 0), 0))


def shard(packed: PackedModel, mesh: Any) -> None:
    """Shard a model so that each block is gathered when needed, its matrices in the dtype of their
    products, the rest in float32: autocast would cast the former and leave the latter, so results
    are those of an unsharded model."""
    lm: Any = packed.lm
    blocks = set(lm._no_split_modules or ())
    placement = partial(_placement, mesh.size(mesh.ndim - 1))
    narrow = packed.compute_dtype if packed.compute_dtype is not torch.float32 else None
    policy = MixedPrecisionPolicy(
        param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in packed.lm.modules():
        if type(block).__name__ in blocks:
            if matrices := list(_linear_layers(block)):
                fully_shard(matrices, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
            if any(parameter.dim() > 1 for parameter in _others(block)):
                fully_shard(block, mesh=mesh, shard_placement_fn=placement)
    fully_shard(packed, mesh=mesh, shard_placement_fn=placement)
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global weight, so gradients are summed,
            # not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _placement(ranks: int, parameter: nn.Parameter) -> Shard:
    """By rows, or by columns where tensor-parallel ranks have so different numbers of rows that
    torch would mistake those of a rank. Raises ModelError if neither is possible."""
    if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
        return Shard(0)
    rows, *columns = parameter.shape
    parts = parameter.device_mesh.size()
    if rows_are_known(rows, parts, ranks):
        return Shard(0)
    if columns and columns[0] % ranks == 0:
        return Shard(1)
    raise ModelError(
        f"a parameter of {rows} rows cannot be sharded over {parts} tensor-parallel and {ranks} "
        "other ranks",
        hint="use another mesh, such as one in which tp divides the vocabulary",
    )


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to a norm, that over all ranks and parameters, which may be sharded over
    different meshes; returns the norm before."""
    by_mesh = list(grouped_by_mesh(parameters))
    norms = [
        nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh
    ]
    whole_norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = whole_norms[0]
    if len(whole_norms) > 1:
        total = torch.linalg.vector_norm(torch.stack(whole_norms))
    norm = float(total)
    if norm + NORM_EPS > max_norm:  # else they would be multiplied by 1
        for group in by_mesh:
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return norm


def grouped_by_mesh(parameters: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Operations on many tensors at once need them to be sharded over the same ranks."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return groups.values()


def forget_gradients(packed: Any) -> None:
    """Drop what the passes of a step that ended in an exception left behind. torch's own reset
    keeps gradients that were to be reduced later."""
    packed.reset_iter_state()
    for module in packed.modules():
        for group in (
            module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ()
        ):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _linear_layers(block: nn.Module) -> Iterator[nn.Module]:
    return (module for module in block.modules() if isinstance(module, nn.Linear | Conv1D))


def _others(block: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters outside linear layers. If only vectors, they are gathered with the embedding,
    once for all blocks."""
    linear = {parameter for module in _linear_layers(block) for parameter in module.parameters()}
    return (parameter for parameter in block.parameters() if parameter not in linear)
