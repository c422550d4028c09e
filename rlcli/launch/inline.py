"""Everything in one process: requests to the worker are plain calls,
so a debugger can follow them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.run_folder import LOGS
from rlcli.errors import WorkerError
from rlcli.inspect.cores import available_cores
from rlcli.launch import lifeline
from rlcli.launch.children import REPLACEMENTS, Members, run_environment
from rlcli.launch.launcher import Death
from rlcli.launch.world import write_for_workers
from rlcli.messaging.messages import RESTARTED, Fields, Request
from rlcli.observe.run_logs import PrintedLog

if TYPE_CHECKING:
    from rlcli.messaging.inline_transport import InlineTransport
    from rlcli.messaging.transport import Transport
    from rlcli.recipe.schema import Recipe
    from rlcli.topology import Topology
    from rlcli.topology.groups import Group


class InlineLauncher:
    """Launches one rank, in this process."""

    def __init__(self, recipe: Recipe, topology: Topology):
        self._recipe, self._topology = recipe, topology

    def start(self, groups: Sequence[Group], run_dir: Path) -> InlineRunning:
        import torch

        from rlcli.messaging.inline_transport import InlineTransport
        from rlcli.runtime.roles import pick_device
        from rlcli.runtime.worker import ModelWorker

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(available_cores())
        members = Members(run_dir, run_environment(1))
        printed = PrintedLog(run_dir / LOGS / "rank0.log")

        def handle(request: Request) -> Fields:
            with printed.copying():
                return worker.handle(request)

        transport = InlineTransport(
            handle,
            lifeline.waiting,
            lambda: look_after(members, transport),
        )
        device = pick_device(self._recipe.cluster.device, 0)
        worker = ModelWorker(self._recipe, self._topology, 0, device, {}, transport.report, run_dir)
        try:
            if any(group.kind == "pool" for group in groups):
                write_for_workers(self._recipe, run_dir)
            members.start(groups, node=0)
        except BaseException:
            members.stop()
            raise
        return InlineRunning(transport, members)


def look_after(members: Members, transport: InlineTransport) -> None:
    """Report those that were started again. Raises WorkerError once one of them is no longer
    replaced."""
    for restart in members.new_restarts():
        transport.report(RESTARTED, restart.as_report(socket.gethostname()))
    check_members(members)


def check_members(members: Members) -> None:
    """Raises WorkerError once one of them is no longer replaced."""
    for death in members.deaths():
        name = f"{death.group}{death.index}"
        message = f"{name} {death}, {REPLACEMENTS + 1} times"
        raise WorkerError(
            message, where=name, hint=f"see {members.log(death.group, death.index)}", code="F01"
        )


class InlineRunning:
    """A rank inside this process, and the servers and pools of the run."""

    def __init__(self, transport: Transport, members: Members):
        self.transport, self._members = transport, members

    def deaths(self) -> list[Death]:
        return self._members.deaths()

    def stop_signal(self) -> int | None:
        return None

    def stop(self, grace: float, show_stacks: bool = False) -> None:
        self.transport.close()
        self._members.stop()
