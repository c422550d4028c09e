"""The servers of a recipe's roles: what they take on devices,
and what is sent to them when weights change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.api.memory import MemoryModel, ServerMemory
from rlcli.recipe.servers import PlacedServer, placed_servers, servers_on

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe
    from rlcli.topology.placement import Topology

BYTES_PER_SECOND = 10**9
"""Expected speed of a transfer to a server: about what one TCP connection of gloo carries."""


@dataclass(frozen=True)
class RoleServers:
    """The servers of a role."""

    role: str
    memory: ServerMemory
    """Memory on each of their devices."""
    placed: tuple[PlacedServer, ...]
    """The servers that the run starts."""
    follows: bool
    """Whether their weights change with those of a trained role."""

    @property
    def on_devices(self) -> bool:
        """Whether the run starts servers that compute on its devices."""
        return any(server.devices for server in self.placed)

    def do_not_fit(self, devices_per_node: int) -> bool:
        """Whether several of them would share a device, or some need more than a node has. A recipe
        for GPUs is refused then; others may turn out to run on processors."""
        users = servers_on(self.placed)
        return any(count > 1 or device >= devices_per_node for (_, device), count in users.items())

    @property
    def seconds_per_update(self) -> float:
        """Expected time for sending weights to one of them."""
        return self.memory.sent / BYTES_PER_SECOND


def plan_servers(
    recipe: Recipe, topology: Topology, models: Mapping[str, MemoryModel], device_bytes: int | None
) -> tuple[RoleServers, ...]:
    """The servers of all roles whose memory model is known."""
    followers = {call.hooks.copy_to for call in recipe.graph.values()}
    planned = []
    for role, model in models.items():
        if (memory := model.server(device_bytes)) is not None:
            ranks = topology.placement(role).ranks
            placed = placed_servers(recipe.models[role], ranks, topology.devices_per_node)
            planned.append(RoleServers(role, memory, tuple(placed), role in followers))
    return tuple(planned)


def bytes_on_ranks(servers: Sequence[RoleServers], topology: Topology) -> Counter[int]:
    """Rank → what servers take on its device."""
    taken: Counter[int] = Counter()
    for of_role in servers:
        for (node, device), count in servers_on(of_role.placed).items():
            if device < topology.devices_per_node:
                taken[node * topology.devices_per_node + device] += count * of_role.memory.total
    return taken
