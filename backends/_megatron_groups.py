"""Megatron-Core's process groups, made from the mesh of one role: the roles of a process may have
different meshes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d


@dataclass(frozen=True)
class RoleGroups:
    """The groups that this rank belongs to, each only of ranks of its role."""

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    """Ranks with different samples."""
    cp: dist.ProcessGroup
    """Ranks that share the tokens of a micro-batch."""
    dp_cp: dist.ProcessGroup
    """Both kinds: ranks with other tokens and, except for experts, the same parameters."""
    ep: dist.ProcessGroup
    """Neighbours among these that together hold all experts."""
    expert_dp: dist.ProcessGroup
    """Ranks that hold the same experts."""
    model: dist.ProcessGroup
    """Ranks that together hold one copy of the model: its stages, their tensor-parallel parts, and
    the experts of these."""
    stage: dist.ProcessGroup
    """The ranks of this stage of the pipeline."""
    all: dist.ProcessGroup
    """Every rank of the role."""
    ends: dist.ProcessGroup | None
    """First and last stage, if they are different ranks and this is one of them."""
    alone: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of the role."""
        return self.all.rank() == 0

    def collection(self) -> ProcessGroupCollection:
        """The groups in the form that Megatron's classes and functions take, so that they use no
        global state. Megatron does not know of context parallelism: to it, these ranks are
        data-parallel."""
        return ProcessGroupCollection(
            tp=self.tp,
            pp=self.pp,
            mp=self.model,
            dp=self.dp_cp,
            dp_cp=self.dp_cp,
            cp=self.alone,
            embd=self.ends,
            pos_embd=None,
            ep=self.ep,
            expt_tp=self.tp,
            expt_dp=self.expert_dp,
            tp_ep_pp=self.model,
            intra_dist_opt=self.all,
        )


_AXES = ("dp", "cp", "pp", "tp")


def role_groups(mesh: Any, expert_ranks: int) -> RoleGroups:
    """The groups of a role with `mesh`, or of one on this rank only (None), in which `expert_ranks`
    data- and context-parallel ranks share a copy of the experts.
    Every rank of the role calls it."""
    if mesh is None:
        groups: dict[str, Any] = {field.name: _alone() for field in fields(RoleGroups)}
        return RoleGroups(**groups | {"ends": None})
    ranks = _by_axis(mesh)
    dp, cp, pp, tp = (ranks == dist.get_rank()).nonzero()[0].tolist()
    stages = ranks[dp, cp, :, tp]
    at_an_end = len(stages) > 1 and pp in (0, len(stages) - 1)
    by_tokens = ranks.flatten(0, 1)
    position = dp * ranks.shape[1] + cp
    first = position - position % expert_ranks
    copy = slice(first, first + expert_ranks)
    alike = slice(position % expert_ranks, None, expert_ranks)
    group_of = cache(_group)  # groups of the same ranks are one

    def among(members: torch.Tensor) -> dist.ProcessGroup:
        return group_of(tuple(members.flatten().tolist()))

    return RoleGroups(
        tp=among(ranks[dp, cp, pp]),
        pp=among(stages),
        dp=among(ranks[:, cp, pp, tp]),
        cp=among(ranks[dp, :, pp, tp]),
        dp_cp=among(by_tokens[:, pp, tp]),
        ep=among(by_tokens[copy, pp, tp]),
        expert_dp=among(by_tokens[alike, pp, tp]),
        model=among(by_tokens[copy]),
        stage=among(ranks[:, :, pp]),
        all=among(ranks),
        ends=among(stages[[0, -1]]) if at_an_end else None,
        alone=_alone(),
    )


def _by_axis(mesh: Any) -> torch.Tensor:
    """The ranks of a mesh, with the dimensions `_AXES`; those that it lacks have one rank."""
    ranks, names = mesh.mesh, mesh.mesh_dim_names
    used = [names.index(name) for name in _AXES if name in names]
    unused = [axis for axis in range(len(names)) if axis not in used]
    sizes = dict(zip(names, ranks.shape, strict=True))
    return ranks.permute(used + unused).reshape([sizes.get(name, 1) for name in _AXES])


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group of ranks that all call this, while others do not."""
    if ranks == (dist.get_rank(),):
        return _alone()
    return dist.new_group(list(ranks), use_local_synchronization=True)


_ALONE: list[dist.ProcessGroup] = []


def _alone() -> dist.ProcessGroup:
    """This rank's group of one, shared by all roles: a group has threads,
    which wake up a hundred times a second."""
    if not _ALONE or _ALONE[0] not in distributed_c10d._world.pg_map:  # from an earlier world
        _ALONE[:] = [dist.new_group([dist.get_rank()], use_local_synchronization=True)]
    return _ALONE[0]
