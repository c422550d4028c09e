"""What the control groups of this process leave to it: in a container or a job often less than the
machine has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ControlGroup:
    """A control group, of version 1 or 2."""

    folder: Path
    version: int

    def number(self, file: str) -> int:
        """The number in a file. Raises OSError, or ValueError for `max`: there is no limit."""
        return int((self.folder / file).read_text())


def control_groups(
    controller: str, membership: Path = MEMBERSHIP, root: Path = ROOT
) -> Iterator[ControlGroup]:
    """The groups of a controller that this process is in, and those above them that are visible: in
    a container the outer ones are not."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            yield from _upwards(root, group, 2)
        elif controller in controllers.split(","):
            yield from _upwards(root / controller, group, 1)


def _upwards(root: Path, group: str, version: int) -> Iterator[ControlGroup]:
    folder = root / group.lstrip("/")
    while folder == root or root in folder.parents:
        yield ControlGroup(folder, version)
        folder = folder.parent


@dataclass(frozen=True)
class MemoryLimit:
    """Of a control group, in bytes."""

    limit: int
    used: int
    """Without files in memory that are not in use: the kernel takes their place when it is
    needed."""

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


def memory_limits(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[MemoryLimit]:
    """The limits on the memory of this process."""
    for group in control_groups("memory", membership, root):
        with contextlib.suppress(OSError, ValueError):
            yield _limit_v2(group) if group.version == 2 else _limit_v1(group)


def _limit_v2(group: ControlGroup) -> MemoryLimit:
    used = group.number("memory.current") - _statistic(group, "inactive_file")
    return MemoryLimit(group.number("memory.max"), used)


def _limit_v1(group: ControlGroup) -> MemoryLimit:
    used = group.number("memory.usage_in_bytes") - _statistic(group, "total_inactive_file")
    return MemoryLimit(group.number("memory.limit_in_bytes"), used)


def _statistic(group: ControlGroup, name: str) -> int:
    lines = (group.folder / "memory.stat").read_text().splitlines()
    return int(dict(line.split() for line in lines).get(name, 0))
