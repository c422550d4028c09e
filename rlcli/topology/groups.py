"""The processes that a run consists of, as data. Launchers start them; nothing above them knows where a group runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlcli import registry

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe
    from rlcli.topology.placement import Topology

Kind = Literal["ranks", "server", "pool"]

RANKS = "ranks"
"""Name of the one group of ranks."""
SERVERS = Path("servers")
"""In the run's folder: a folder for each server (see `server_slot`)."""


@dataclass(frozen=True)
class Group:
    """Processes that are started alike."""

    name: str
    kind: Kind
    """`ranks` are one torch.distributed world: if one dies, all end. A `server`, which others speak to at an address,
    or a process of a `pool` can be replaced by itself."""
    nodes: tuple[int, ...]
    """The node of each process; its position here is the index of the process."""
    command: tuple[str, ...] = ()
    """What each process of a pool runs. What a server runs is said by its client, what ranks run by the launcher."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its processes see besides those of the run. No secrets: other users may be able to read them."""

    def on_node(self, node: int) -> tuple[int, ...]:
        """The indices of its processes on a node."""
        return tuple(index for index, place in enumerate(self.nodes) if place == node)


def process_groups(recipe: Recipe, topology: Topology) -> tuple[Group, ...]:
    """All processes of a run, but for the master, which is a process of the first node. A rank's servers are on its
    node."""
    nodes = tuple(rank // topology.devices_per_node for rank in range(topology.world_size))
    servers = (
        Group(
            _name(role), "server", tuple(nodes[rank] for rank in topology.placement(role).ranks for _ in range(count))
        )
        for role in recipe.models
        if (count := servers_of_a_rank(recipe, role))
    )
    return (Group(RANKS, "ranks", nodes), *servers)


def servers_of_a_rank(recipe: Recipe, role: str) -> int:
    """How many servers the run starts for each rank of a role."""
    backend = recipe.models[role].backend
    count = registry.load_declared("backends", backend.type, "SERVERS") if backend is not None else None
    return int(count(backend.args)) if count is not None and backend is not None else 0


def server_folders(recipe: Recipe, topology: Topology, role: str, rank: int, run_dir: Path) -> tuple[Path, ...]:
    """Those of the servers that a rank of a role has."""
    count = servers_of_a_rank(recipe, role)
    first = topology.placement(role).ranks.index(rank) * count
    return tuple(server_folder(run_dir, _name(role), first + index) for index in range(count))


def server_folder(run_dir: Path, group: str, index: int) -> Path:
    """That of a process of a server group."""
    return run_dir / SERVERS / f"{group}{index}"


def _name(role: str) -> str:
    return f"{role}-server"
