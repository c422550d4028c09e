"""Which ranks hold which roles, in which mesh, and which share of a batch each works on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

from rlcli.recipe.mesh import Mesh, devices_of, mesh_of, world_of
from rlcli.topology.batch import BatchArithmetic, batch_of

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe

Item = TypeVar("Item")


@dataclass(frozen=True)
class RolePlacement:
    """Where a role lives."""

    role: str
    ranks: tuple[int, ...]
    mesh: Mesh

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks whose outputs count: the first of each data-parallel replica."""
        return self.ranks[:: self._of_replica]

    def share_out(self, items: Sequence[Item], loads: Sequence[int]) -> dict[int, list[Item]]:
        """Rank → its share (see `shares`); ranks of one data-parallel replica get the same."""
        parts = shares(items, loads, self.mesh.dp)
        return {rank: parts[number // self._of_replica] for number, rank in enumerate(self.ranks)}

    @property
    def _of_replica(self) -> int:
        """The ranks of a data-parallel replica."""
        return len(self.ranks) // self.mesh.dp


@dataclass(frozen=True)
class WorkerGroup:
    """Roles that share the same devices."""

    ranks: tuple[int, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """A recipe laid out on its cluster."""

    nodes: int
    devices_per_node: int
    device: str
    launch: str
    placements: tuple[RolePlacement, ...]
    groups: tuple[WorkerGroup, ...]
    batch: BatchArithmetic

    @property
    def world_size(self) -> int:
        """Worker processes, one per device."""
        return self.nodes * self.devices_per_node

    @property
    def open_steps(self) -> int:
        """Steps that may be in progress at once: with several groups, one can begin while another
        is still at work."""
        return 2 if len(self.groups) > 1 else 1

    def placement(self, role: str) -> RolePlacement:
        """Where a role lives."""
        return next(p for p in self.placements if p.role == role)

    def roles_on(self, rank: int) -> tuple[str, ...]:
        """The roles that a rank holds a part of, in the recipe's order."""
        return self._roles_by_rank[rank]

    @cached_property
    def first_ranks(self) -> dict[tuple[str, ...], int]:
        """Roles that some rank holds → the first such rank."""
        first: dict[tuple[str, ...], int] = {}
        for rank, roles in enumerate(self._roles_by_rank):
            first.setdefault(roles, rank)
        return first

    @cached_property
    def _roles_by_rank(self) -> list[tuple[str, ...]]:
        roles_of: list[list[str]] = [[] for _ in range(self.world_size)]
        for placement in self.placements:
            for rank in placement.ranks:
                roles_of[rank].append(placement.role)
        return [tuple(roles) for roles in roles_of]


def shares(items: Sequence[Item], loads: Sequence[int], parts: int) -> list[list[Item]]:
    """Contiguous shares, each cut where the sum of the loads before it is closest to its target.
    Roles on equal meshes get equal shares; some are empty if items are few or one of them outweighs
    the others."""
    sums = [0, *accumulate(loads)]
    cuts = [0]
    for number in range(1, parts):
        due = sums[-1] * number / parts
        after = bisect_left(sums, due)
        is_closer = after > 0 and due - sums[after - 1] < sums[after] - due
        cuts.append(max(cuts[-1], after - is_closer))
    return [list(items[a:b]) for a, b in pairwise([*cuts, len(items)])]


def plan_topology(recipe: Recipe) -> Topology:
    """Lay out a validated recipe. Raises DevicesError if a mesh does not fit."""
    world = world_of(recipe.cluster)
    placements: list[RolePlacement] = []
    for name, role in recipe.models.items():
        ranks = devices_of(name, role.devices, world)
        placements.append(RolePlacement(name, ranks, mesh_of(name, role.mesh, len(ranks))))
    groups: dict[tuple[int, ...], list[str]] = {}
    for placement in placements:
        groups.setdefault(placement.ranks, []).append(placement.role)
    return Topology(
        nodes=recipe.cluster.nodes,
        devices_per_node=recipe.cluster.devices_per_node,
        device=recipe.cluster.device,
        launch=recipe.launch.type,
        placements=tuple(placements),
        groups=tuple(WorkerGroup(ranks, tuple(roles)) for ranks, roles in groups.items()),
        batch=batch_of(recipe, {p.role: p.mesh for p in placements}),
    )
