"""One process per device on this machine, as one node or several;
the master stays in the calling process.

Each node has an agent, which is torchrun (see `node`). Several nodes on one machine share no more
than several machines do: each has its own temporary and working folder; all share the run's folder
and reach each other by TCP.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.run_folder import PROCESSES
from rlcli.launch.children import (
    GONE_WITHIN,
    Process,
    end_session,
    exit_code,
    run_environment,
    start_child,
    wait_until,
)
from rlcli.launch.launcher import Death
from rlcli.launch.meeting import meeting_folder
from rlcli.launch.node import agent_command
from rlcli.launch.world import World, write_for_workers, write_records
from rlcli.processes import ProcessRecord
from rlcli.runtime.worker_main import MEETING
from rlcli.topology.groups import RANKS, Group

if TYPE_CHECKING:
    from rlcli.messaging.zmq_master import ZmqMaster
    from rlcli.recipe.schema import Recipe


class LocalLauncher:
    """Starts all processes of a run on this machine, except nodes that are started by hand
    (`launch.by_hand`)."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe

    def start(self, groups: Sequence[Group], run_dir: Path) -> LocalRunning:
        write_for_workers(self._recipe, run_dir)
        return LocalRunning(self._recipe, groups, run_dir)


class LocalRunning:
    """The processes of one run."""

    def __init__(self, recipe: Recipe, groups: Sequence[Group], run_dir: Path):
        self._recipe, self._run_dir = recipe, run_dir
        self._agents: dict[int, Process] = {}
        self._here: list[ProcessRecord] = []
        """The processes on this machine."""
        ranks = next(group for group in groups if group.name == RANKS)
        with contextlib.ExitStack() as undo:
            self._own = meeting_folder()
            undo.callback(self._own.close)
            self._world = World(recipe, ranks, run_dir, self._own.path, self._agent_exit)
            undo.pop_all()
        try:
            for node in self._nodes:
                environment, folder = self._place(node)
                self._agents[node] = start_agent(run_dir, node, environment, folder)
            self._world.wait()
            self._note_processes()
        except BaseException:
            self.stop(0)
            raise

    @property
    def transport(self) -> ZmqMaster:
        return self._world.transport

    @property
    def _nodes(self) -> range:
        """The nodes that are started here."""
        return range(1 if self._recipe.launch.by_hand else self._recipe.cluster.nodes)

    def _place(self, node: int) -> tuple[Mapping[str, str], Path | None]:
        """Environment and working folder of a node's processes."""
        environment = run_environment(self._recipe.cluster.devices_per_node * len(self._nodes))
        environment[MEETING] = str(self._world.meeting)
        if len(self._nodes) == 1:
            return environment, None
        home = self._own.path / f"node{node}"
        for folder in (home / "tmp", home / "work"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return environment | {"TMPDIR": str(home / "tmp")}, home / "work"

    def deaths(self) -> list[Death]:
        return self._world.deaths()

    def stop_signal(self) -> int | None:
        return self._world.stop_signal()  # of a node that was started by hand

    def stop(self, grace: float, show_stacks: bool = False) -> None:
        """End everything: ranks die with their agents by their parent-death signal."""
        if show_stacks:
            self._world.ask_for_stacks(self._here)
        end = time.monotonic() + grace
        while time.monotonic() < end and not self._have_ended():
            time.sleep(0.02)
        self._world.dismiss(self._agents)
        for agent in self._agents.values():
            end_session(agent)
        self._end_stragglers()
        self._world.close()
        self._own.close()

    def _have_ended(self) -> bool:
        return not any(
            exit_code(agent) is None for agent in self._agents.values()
        ) and not self._world.others(self._agents)

    def _agent_exit(self, node: int) -> int | None:
        return exit_code(self._agents[node]) if node in self._agents else None

    def _note_processes(self) -> None:
        """Record the processes."""
        records = self._world.records()
        self._here = [
            ProcessRecord(socket.gethostname(), record.pid, record.started)
            for record in records
            if record.node in self._nodes and record.started is not None
        ]
        write_records(self._run_dir / PROCESSES, records)

    def _end_stragglers(self) -> None:
        """End processes that somehow did not end with their parent."""
        left = [process for process in self._here if process.send(signal.SIGKILL)]
        wait_until(lambda: not any(process.is_alive() for process in left), GONE_WITHIN)


def start_agent(
    run_dir: Path, node: int, environment: Mapping[str, str], folder: Path | None
) -> Process:
    """Start the agent of a node, which leads its own session and ends with this process."""
    return start_child(
        agent_command(run_dir, node), run_dir / "logs" / f"node{node}.log", environment, folder
    )
