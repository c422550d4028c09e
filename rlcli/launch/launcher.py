"""The protocol of launchers: start the groups of a run, and be responsible for their processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rlcli.processes import ended_how

if TYPE_CHECKING:
    from rlcli.messaging.transport import Transport
    from rlcli.topology.groups import Group


@dataclass(frozen=True)
class Death:
    """A process that ended without being asked to."""

    group: str
    index: int
    node: int
    exit: int
    """Exit code; a negative number is the signal that killed it."""
    out_of_memory: bool | None = None
    """Whether the kernel killed it because memory ran out; None if unknown."""

    def __str__(self) -> str:
        return ended_how(self.exit, self.out_of_memory)


class Restart(NamedTuple):
    """A process of a server or a pool that ended and was started again."""

    group: str
    number: int
    how: str
    """How it ended, to follow its name."""

    def as_report(self, machine: str) -> dict[str, str]:
        """The content of a report RESTARTED; `machine`: where it happened."""
        return {
            "group": self.group,
            "name": f"{self.group}{self.number}",
            "machine": machine,
            "how": self.how,
        }


class Running(Protocol):
    """The started processes of a run."""

    @property
    def transport(self) -> Transport:
        """The master's connection to the ranks."""

    def deaths(self) -> list[Death]:
        """The processes that have ended and are not replaced,
        in the order in which this was noticed."""

    def stop_signal(self) -> int | None:
        """A stop signal that a process on some node has received instead of this one."""

    def stop(self, grace: float, show_stacks: bool = False) -> None:
        """End all processes: those that do not exit by themselves within `grace` seconds are
        killed. `show_stacks`: first have ranks write their stacks to their logs."""


class Launcher(Protocol):
    """Starts processes."""

    def start(self, groups: Sequence[Group], run_dir: Path) -> Running:
        """Start all processes of a run, and wait until its ranks are up.
        Nothing is left behind if that fails."""
