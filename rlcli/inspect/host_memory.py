"""The memory of this machine, as far as this container or job may use it."""

from __future__ import annotations

from typing import NamedTuple

from rlcli.inspect.control_groups import memory_limits


class HostMemory(NamedTuple):
    """Bytes."""

    free: int
    total: int


def host_memory() -> HostMemory:
    import psutil

    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for of_group in memory_limits():
        free, total = min(free, of_group.free), min(total, of_group.limit)
    return HostMemory(free, total)
