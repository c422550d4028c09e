"""The memory of a client of servers; theirs is their own. No torch here: `rlcli plan` imports this file."""

from __future__ import annotations

from rlcli.api.memory import Generation, Kept, MemoryModel, Parts


class ClientMemory(MemoryModel):
    """The client has weights as files: of them a parameter at a time is in memory, and all of them for a checkpoint."""

    def kept(self) -> Kept:
        return Kept(0)

    def load(self) -> Parts:
        return Parts()

    def snapshot(self) -> int:
        return 4 * self.role.architecture.parameters(self.role.head)

    def generate(self, asked: Generation) -> Parts:
        return Parts()
