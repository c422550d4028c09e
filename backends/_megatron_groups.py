"""Megatron-Core's process groups, made from the mesh of one role: the roles of a process may have
different meshes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d


@dataclass(frozen=True)
class RoleGroups:
    """The groups that this rank belongs to, each only of ranks of its role."""

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    model: dist.ProcessGroup
    """Ranks that share one copy of the model: its stages and their tensor-parallel parts."""
    all: dist.ProcessGroup
    """Every rank of the role."""
    ends: dist.ProcessGroup | None
    """First and last stage, if they are different ranks and this is one of them."""
    alone: dist.ProcessGroup
    stage: tuple[tuple[int, ...], ...]
    """The ranks of this stage, indexed by tensor-parallel, then by data-parallel rank."""

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of the role."""
        return self.all.rank() == 0

    def collection(self) -> ProcessGroupCollection:
        """The groups in the form that Megatron's classes and functions take,
        so that they use no global state."""
        return ProcessGroupCollection(
            tp=self.tp,
            pp=self.pp,
            mp=self.model,
            dp=self.dp,
            dp_cp=self.dp,
            cp=self.alone,
            embd=self.ends,
            pos_embd=None,
            ep=self.alone,
            expt_tp=self.tp,
            expt_dp=self.dp,
            tp_ep_pp=self.model,
            intra_dist_opt=self.all,
        )


def role_groups(mesh: Any) -> RoleGroups:
    """The groups of a role with `mesh`, or of one on this rank only (None).
    Every rank of the role calls it."""
    # scratch memory of Megatron's attention, not a group
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    if mesh is None:
        alone = _alone()
        return RoleGroups(alone, alone, alone, alone, alone, None, alone, ((dist.get_rank(),),))
    ranks, names = mesh.mesh, mesh.mesh_dim_names
    by_name = {name: ranks.shape[axis] for axis, name in enumerate(names)}
    used = [names.index(name) for name in ("dp", "pp", "tp") if name in names]
    unused = [axis for axis in range(len(names)) if axis not in used]
    cube = ranks.permute(used + unused).reshape(
        [by_name.get(name, 1) for name in ("dp", "pp", "tp")]
    )
    dp, pp, tp = (cube == dist.get_rank()).nonzero()[0].tolist()
    stages = cube[dp, :, tp].tolist()
    at_an_end = len(stages) > 1 and pp in (0, len(stages) - 1)
    return RoleGroups(
        tp=_group(cube[dp, pp].tolist()),
        pp=_group(stages),
        dp=_group(cube[:, pp, tp].tolist()),
        model=_group(cube[dp].flatten().tolist()),
        all=_group(cube.flatten().tolist()),
        ends=_group([stages[0], stages[-1]]) if at_an_end else None,
        alone=_alone(),
        stage=tuple(map(tuple, cube[:, pp].T.tolist())),
    )


@contextmanager
def no_scratch_left() -> Iterator[None]:
    """Free the memory for scores that Megatron's attention would keep,
    as much as the largest batch has needed."""
    try:
        yield
    finally:
        parallel_state.get_global_memory_buffer().buffer.clear()


def _group(ranks: list[int]) -> dist.ProcessGroup:
    """A group of ranks that all call this, while others do not."""
    return (
        _alone()
        if ranks == [dist.get_rank()]
        else dist.new_group(ranks, use_local_synchronization=True)
    )


_ALONE: list[dist.ProcessGroup] = []


def _alone() -> dist.ProcessGroup:
    """This rank's group of one, shared by all roles: a group has threads,
    which wake up a hundred times a second."""
    if not _ALONE or _ALONE[0] not in distributed_c10d._world.pg_map:  # from an earlier world
        _ALONE[:] = [dist.new_group([dist.get_rank()], use_local_synchronization=True)]
    return _ALONE[0]
