"""The processes that a run consists of, as data. Launchers start them; nothing above them knows where a group runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlcli.topology.placement import Topology

Kind = Literal["ranks", "server", "pool"]

RANKS = "ranks"
"""Name of the one group of ranks."""
PORT = "{port}"
"""Stands, in the command of a server, for a port that is free on its node."""


@dataclass(frozen=True)
class Group:
    """Processes that are started alike."""

    name: str
    kind: Kind
    """`ranks` are one torch.distributed world: if one dies, all end. A process of a `server`, which others speak to at
    an address, or of a `pool` can be replaced by itself."""
    nodes: tuple[int, ...]
    """The node of each process; its position here is the index of the process."""
    command: tuple[str, ...] = ()
    """What each process runs. That of ranks is the launcher's affair."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its processes see besides those of the run. No secrets: other users may be able to read them."""

    def on_node(self, node: int) -> tuple[int, ...]:
        """The indices of its processes on a node."""
        return tuple(index for index, place in enumerate(self.nodes) if place == node)


def process_groups(topology: Topology) -> tuple[Group, ...]:
    """All processes of a run, but for the master, which is a process of the first node."""
    nodes = tuple(rank // topology.devices_per_node for rank in range(topology.world_size))
    return (Group(RANKS, "ranks", nodes),)
