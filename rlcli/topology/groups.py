"""The processes of a run, as data. Launchers start them;
nothing above them knows where a group runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlcli.api.dataflow import ModelInterfaceType, calls_ahead
from rlcli.recipe.components import declared
from rlcli.recipe.graph import eval_graph, train_graph
from rlcli.recipe.role_sources import mirrored_roles
from rlcli.recipe.servers import nodes_of_a_server, servers_of_a_rank

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe
    from rlcli.topology.placement import Topology

Kind = Literal["ranks", "server", "pool"]

MOVES = "moves"
"""Lane of a rank that transfers tensors."""
RANKS = "ranks"
"""Name of the one group of ranks."""
FOLDERS: Mapping[Kind, str] = {"server": "servers", "pool": "pools"}
"""Subfolder of the run's folder with a folder for each process of such a group,
where it and its rank meet."""
GIVEN_UP = "given-up"
"""File in the folder of a pool process that is not replaced any more; it says why."""
LAST_EXIT = "RLCLI_LAST_EXIT"
"""Variable that tells a pool process how the process that it replaces ended."""


@dataclass(frozen=True)
class Group:
    """Processes that are started in the same way."""

    name: str
    kind: Kind
    """`ranks` are one torch.distributed world: if one dies, all end. A `server`, which others reach
    at an address, and a process of a `pool` can be replaced individually."""
    nodes: tuple[int, ...]
    """The node of each process; its position here is the index of the process."""
    command: tuple[str, ...] = ()
    """What each process of a pool runs, followed by the run's folder and its index. A server's
    command comes from its client, that of ranks from the launcher."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its processes see besides those of the run. No secrets: other users may be
    able to read them."""
    processes_of_each: int = 1
    """How many consecutive processes are one server, each on another node.
    The first has its endpoint."""

    def on_node(self, node: int) -> tuple[int, ...]:
        """The indices of its processes on a node."""
        return tuple(self._on_nodes.get(node, ()))

    @cached_property
    def _on_nodes(self) -> dict[int, list[int]]:
        """Node → the indices of its processes."""
        indices: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            indices.setdefault(node, []).append(index)
        return indices


def process_groups(recipe: Recipe, topology: Topology) -> tuple[Group, ...]:
    """All processes of a run except the master, which is a process of the first node. A rank's
    servers and pool processes are on its node."""
    nodes = tuple(rank // topology.devices_per_node for rank in range(topology.world_size))

    def placed(role: str) -> tuple[int, ...]:
        return topology.placement(role).ranks

    def servers(role: str, count: int) -> Group:
        spread = nodes_of_a_server(recipe.models[role])
        first_nodes = [nodes[rank] for rank in placed(role) for _ in range(count)]
        of_processes = tuple(first + number for first in first_nodes for number in range(spread))
        return Group(_server_name(role), "server", of_processes, processes_of_each=spread)

    counts = {name: servers_of_a_rank(role) for name, role in recipe.models.items()}
    server_groups = (servers(role, count) for role, count in counts.items() if count)
    pools = (
        Group(
            pool_name(role),
            "pool",
            tuple(nodes[rank] for rank in placed(role)),
            (sys.executable, "-P", "-m", "rlcli.runtime.pool", role),
            {"CUDA_VISIBLE_DEVICES": ""},
        )
        for role in pooled_roles(recipe)
    )
    return (Group(RANKS, "ranks", nodes), *server_groups, *pools)


def pooled_roles(recipe: Recipe) -> tuple[str, ...]:
    """The roles whose calls run in processes of a pool, one for each rank."""
    return tuple(
        name
        for name, role in recipe.models.items()
        if declared("backends", role.engine.type, "POOLED")
    )


def pool_name(role: str) -> str:
    """Name of the role's process group, and of the lane of a rank that waits for one."""
    return f"{role}-pool"


def pausing_roles(recipe: Recipe, topology: Topology) -> tuple[str, ...]:
    """The roles that keep generating while their weights change: they only generate, and follow a
    trained role on ranks of their own, each of which can pause alone."""
    if not recipe.train.max_staleness:
        return ()
    ahead = {mfc.model_name for mfc in calls_ahead(train_graph(recipe))}
    others = {
        mfc.model_name
        for mfc in (*train_graph(recipe), *eval_graph(recipe))
        if mfc.interface_type is not ModelInterfaceType.GENERATE
    }
    trained = {rank for role in recipe.trained_roles for rank in topology.placement(role).ranks}

    def can_pause(role: str) -> bool:
        placement = topology.placement(role)
        streams = declared("backends", recipe.models[role].engine.type, "STREAMS")
        is_whole = placement.mesh.dp == len(placement.ranks)
        return bool(streams and is_whole and trained.isdisjoint(placement.ranks))

    followers = [role for role in mirrored_roles(recipe) if role in ahead - others]
    return tuple(filter(can_pause, followers))


def prompts_in_progress(recipe: Recipe, topology: Topology, role: str) -> int:
    """The number of prompts for which a rank of a generating role has responses in progress at
    once."""
    steps = recipe.train.max_staleness if role in pausing_roles(recipe, topology) else 0
    prompts = recipe.train.prompts_per_step * (steps + 1)
    return -(-prompts // topology.placement(role).mesh.dp)


def responses_name(role: str) -> str:
    """Name of the lane of a rank in which a role's calls generate side by side."""
    return f"{role}-responses"


def lanes_of_roles(recipe: Recipe, topology: Topology) -> dict[str, str]:
    """Role whose calls have a lane of their own on each of its ranks → the name of that lane."""
    pools = {role: pool_name(role) for role in pooled_roles(recipe)}
    return pools | {role: responses_name(role) for role in pausing_roles(recipe, topology)}


def lanes_aside(recipe: Recipe) -> frozenset[str]:
    """Lanes in which a rank does not compute: it moves tensors, or waits for a pool."""
    return frozenset([MOVES, *map(pool_name, pooled_roles(recipe))])


def lanes_of(recipe: Recipe, topology: Topology) -> dict[str, tuple[int, ...]]:
    """Lane → the ranks that have it."""
    moves = {MOVES: tuple(range(topology.world_size))} if topology.world_size > 1 else {}
    lanes = lanes_of_roles(recipe, topology).items()
    return moves | {lane: topology.placement(role).ranks for role, lane in lanes}


def pool_folders(recipe: Recipe, topology: Topology, rank: int, run_dir: Path) -> dict[str, Path]:
    """Role → the folder of the process that runs its calls for a rank."""
    ranks = {role: topology.placement(role).ranks for role in pooled_roles(recipe)}
    return {
        role: process_folder(run_dir, "pool", pool_name(role), of_role.index(rank))
        for role, of_role in ranks.items()
        if rank in of_role
    }


def server_folders(
    recipe: Recipe, topology: Topology, role: str, rank: int, run_dir: Path
) -> tuple[Path, ...]:
    """The folders of the servers that a rank of a role has, one for each process."""
    count = servers_of_a_rank(recipe.models[role]) * nodes_of_a_server(recipe.models[role])
    first = topology.placement(role).ranks.index(rank) * count
    return tuple(
        process_folder(run_dir, "server", _server_name(role), first + index)
        for index in range(count)
    )


def process_folder(run_dir: Path, kind: Kind, group: str, index: int) -> Path:
    """The folder of a process of a server or a pool."""
    return run_dir / FOLDERS[kind] / f"{group}{index}"


def _server_name(role: str) -> str:
    return f"{role}-server"
