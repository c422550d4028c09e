"""The servers that a run starts for its roles, and their devices, from what a backend declares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli import registry
from rlcli.recipe.components import declared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlcli.recipe.schema import Role


@dataclass(frozen=True)
class PlacedServer:
    """A server next to a rank."""

    rank: int
    """The rank that the server belongs to."""
    nodes: tuple[int, ...]
    """Where its processes are; the first is its rank's."""
    devices: tuple[int, ...]
    """Its devices on each of these, as numbers on the node; empty if it computes on processors."""


def servers_of_a_rank(role: Role) -> int:
    """How many servers the run starts for each rank of a role."""
    count = registry.load_declared("backends", role.engine.type, "SERVERS")
    return int(count(role.engine.args)) if count is not None else 0


def nodes_of_a_server(role: Role) -> int:
    """How many nodes each server of a role spans."""
    count = registry.load_declared("backends", role.engine.type, "SERVER_NODES")
    return int(count(role.engine.args)) if count is not None else 1


def placed_servers(role: Role, ranks: Sequence[int], devices_per_node: int) -> list[PlacedServer]:
    """The servers of a role with these ranks, in the order of its ranks."""
    backend = role.engine
    if declared("backends", backend.type, "SERVER_DEVICES") is None:
        return []
    placed_on = registry.load_declared("backends", backend.type, "SERVER_DEVICES")
    count = nodes_of_a_server(role)
    first_nodes = ((rank, rank // devices_per_node) for rank in ranks)
    return [
        PlacedServer(rank, tuple(range(node, node + count)), devices)
        for rank, node in first_nodes
        for devices in placed_on(backend.args, rank % devices_per_node)
    ]


def servers_on(servers: Sequence[PlacedServer]) -> Counter[tuple[int, int]]:
    """(node, device) → how many servers compute on it."""
    return Counter(
        (node, device) for server in servers for node in server.nodes for device in server.devices
    )
