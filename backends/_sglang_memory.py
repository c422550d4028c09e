"""The memory of a client of servers (not theirs), and the number of servers. No torch: `rlcli plan` imports this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcli.api.memory import Generation, Kept, MemoryModel, Parts


class ClientMemory(MemoryModel):
    """The client has weights as files: one parameter at a time is in memory, and all of them for a checkpoint."""

    def kept(self) -> Kept:
        return Kept(0)

    def load(self) -> Parts:
        return Parts()

    def snapshot(self) -> int:
        return 4 * self.role.architecture.parameters(self.role.head)

    def generate(self, asked: Generation) -> Parts:
        return Parts()


def servers_of_a_rank(args: Mapping[str, Any]) -> int:
    """Number of servers that the run starts for each rank of a role, from the arguments of its backend."""
    return args.get("servers", 1) if args.get("python") is not None else 0
