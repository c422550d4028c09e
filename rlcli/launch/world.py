"""The ranks of a run as the master sees them, whoever started them: their connection,
and which have died."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlcli.api.network import address_of
from rlcli.errors import HangError, WorkerError
from rlcli.files import private_file
from rlcli.launch.interfaces import interface_of
from rlcli.launch.launcher import Death, Restart
from rlcli.launch.memory_kills import explain_kill
from rlcli.launch.node import SHARED_MEETING, agent_command
from rlcli.launch.stacks import ask_for_stacks
from rlcli.messaging.messages import RESTARTED, Report
from rlcli.messaging.pulse import LOST_AFTER, Peer
from rlcli.observe.run_logs import as_text
from rlcli.observe.tail import last_lines
from rlcli.open_files import TOO_MANY, needed_by_rank, too_few
from rlcli.processes import ProcessRecord, ended_how
from rlcli.runtime.worker_main import WORKER_FILE
from rlcli.topology.groups import RANKS, Group

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe

REPORT_WITHIN = 5.0
"""Seconds within which an agent reports a rank that failed."""
LEAVE_WITHIN = 3.0
"""Seconds for agents of other launchers or machines to learn that the run is over."""
TERMINATED = "terminate called recursively"
"""What a process prints if two threads end it at once; it hides the reasons of both."""
LAST_LINES = 12


class ProcessEntry(NamedTuple):
    """A process of a run: enough to identify it on its machine."""

    name: str
    node: int
    host: str | None
    pid: int
    started: str | None


class World:
    """All ranks of a run, and the agents of their nodes."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: Group,
        run_dir: Path,
        local_folder: Path | None,
        agent_exit: Callable[[int], int | None],
        host_of: Callable[[int], str | None] = lambda node: None,
    ):
        """Listen to them. `local_folder`: a folder of this machine in which they meet if all are
        here; `agent_exit`: the exit code of a node's agent, as far as its launcher knows it; it may
        raise an error about the node. `host_of`: the name of a node's machine, where its launcher
        has one; otherwise it is what its agent reports."""
        from rlcli.messaging.zmq_master import ZmqMaster

        self._ranks, self._logs = ranks, run_dir / "logs"
        self._agent_exit, self._host_of = agent_exit, host_of
        self._is_up = False
        """Whether all ranks were up."""
        self._restarts_of: Counter[int] = Counter()
        """Node → how many restarts of its processes were reported."""
        self._has_nodes = local_folder is None or recipe.cluster.nodes > 1
        self._deadline, self._by_hand = recipe.launch.startup_deadline, recipe.launch.by_hand
        self._interface = interface_of(recipe)
        host = address_of(self._interface) if self._has_nodes else None
        self.meeting = (
            run_dir / SHARED_MEETING if local_folder is None or self._has_nodes else local_folder
        )
        if self._has_nodes:
            shutil.rmtree(self.meeting, ignore_errors=True)
            self.meeting.mkdir(mode=0o700)
        self.transport = ZmqMaster(self.meeting, len(ranks.nodes), self._check_alive, host)

    def wait(self) -> None:
        """Wait until all ranks are up. Raises HangError, WorkerError,
        and the error of a rank that cannot start."""
        try:
            self.transport.wait_for_workers(self._deadline)
            self._wait_for_heartbeats()
            self._is_up = True
        except HangError:
            missing = sorted({*self._ranks.nodes} - {*self._agent_facts()})
            if not missing:
                raise
            message = (
                f"the node has not joined within {self._deadline:.0f} s (launch.startup_deadline)"
            )
            command = shlex.join(agent_command(self._logs.parent, missing[0]))
            hint = f"start it: {command}" if self._by_hand else f"see the logs in {self._logs}"
            raise HangError(message, where=self.name_of(missing[0]), hint=hint) from None

    def _wait_for_heartbeats(self) -> None:
        """Wait for the first heartbeat of each agent and rank. On a busy machine an agent's may be
        late, and the record of the run's processes holds only those that were heard from."""
        agents: set[Peer] = {("node", node) for node in self._ranks.nodes}
        ranks: set[Peer] = {("rank", rank) for rank in range(len(self._ranks.nodes))}
        end = time.monotonic() + self._deadline
        while late := sorted((agents | ranks) - self.transport.pulses.facts.keys()):
            if time.monotonic() > end:
                raise HangError(f"no heartbeat from {late[0][0]} {late[0][1]} so far")
            self._check_alive(LOST_AFTER)
            time.sleep(0.02)

    # -- who is alive ------------------------------------------------------------------------------

    def deaths(self) -> list[Death]:
        """The first rank that each agent reports, or all ranks of an agent that died itself."""
        reported = [
            Death(RANKS, facts["rank"], node, facts["exit"], facts.get("out_of_memory"))
            for node, facts in self._agent_facts().items()
            if "rank" in facts
        ]
        with_agents = [
            Death(RANKS, rank, node, code)
            for node in sorted({*self._ranks.nodes})
            if (code := self._agent_exit(node)) is not None and not self._has_finished(node)
            for rank in self._ranks.on_node(node)
        ]
        return reported or with_agents

    def records(self) -> list[ProcessEntry]:
        """The processes that have identified themselves."""
        facts, agents = self.transport.pulses.facts, self._agent_facts()
        hosts = {node: agent.get("host") for node, agent in agents.items()}
        nodes = [
            ProcessEntry(f"node{node}", node, hosts[node], agent["pid"], agent.get("started"))
            for node, agent in agents.items()
        ]
        ranks = []
        for rank, pid in sorted(self.transport.pids.items()):
            node, began = self._ranks.nodes[rank], facts.get(("rank", rank), {}).get("started")
            ranks.append(ProcessEntry(f"rank{rank}", node, hosts.get(node), pid, began))
        members = [
            ProcessEntry(name, node, hosts[node], *record)
            for node, agent in agents.items()
            for name, record in agent.get("members", {}).items()
        ]
        return [*nodes, *ranks, *members]

    def has_come(self, node: int) -> bool:
        """Whether a node's agent was ever heard from."""
        return ("node", node) in self.transport.pulses.heard

    def name_of(self, node: int) -> str:
        """A node by the name of its machine, if that is known, and its number in the run."""
        host = self._host_of(node) or self._agent_facts().get(node, {}).get("host")
        return f"{host} (node {node} of the run)" if host is not None else f"node {node}"

    def stop_signal(self) -> int | None:
        """A stop signal that some agent has received, as long as no process has died."""
        if any(facts.keys() & {"rank", "failure"} for facts in self._agent_facts().values()):
            return None
        return next(
            (
                facts["asked_to_stop"]
                for facts in self._agent_facts().values()
                if "asked_to_stop" in facts
            ),
            None,
        )

    def _agent_facts(self) -> dict[int, dict[str, Any]]:
        """Node → what its agent reports."""
        return {
            node: facts
            for (kind, node), facts in sorted(self.transport.pulses.facts.items())
            if kind == "node"
        }

    def _has_finished(self, node: int) -> bool:
        return self.transport.has_let_go or bool(self._agent_facts().get(node, {}).get("is_over"))

    def _check_alive(self, patience: float) -> None:
        """Raises WorkerError once a rank or an agent has ended, or an agent has been silent for
        longer than `patience` seconds; ResourceError for a node that does not permit enough open
        files."""
        self._report_restarts()
        self._check_open_files()
        gone = self._first_that_left()
        if gone is not None:
            self._await_report()
        for node, facts in self._agent_facts().items():
            if "rank" in facts:
                code, is_memory = facts["exit"], facts.get("out_of_memory")
                explanation = explain_kill(
                    code, is_memory, facts.get("memory", 0), self._logs.parent
                )
                raise self._rank_error(
                    node, facts["rank"], ended_how(code, is_memory) + explanation
                )
            if "failure" in facts:
                raise self._node_error(node, facts["failure"])
        for node in sorted({*self._ranks.nodes}):
            code = self._agent_exit(node)
            if code is not None and not self._has_finished(node):
                raise self._node_error(node, f"its agent {ended_how(code)}")
        if gone is not None:
            message = (
                "ended with exit code 0 before the run was over: sys.exit or os._exit was called"
            )
            raise self._rank_error(*gone, message)
        self._check_silence(patience)

    def _check_open_files(self) -> None:
        needed = needed_by_rank(len(self._ranks.nodes))
        for node, facts in self._agent_facts().items():
            if (limit := facts.get("open_files", needed)) < needed:
                who = f"a rank on node {node} ({facts['host']})"
                raise too_few(limit, needed, who, where=f"node {node}")

    def _report_restarts(self) -> None:
        """Report servers and processes of pools that were started again, once all ranks are up."""
        for node, facts in self._agent_facts().items() if self._is_up else ():
            for restart in facts.get("restarts", ())[self._restarts_of[node] :]:
                self._restarts_of[node] += 1
                report = Restart(*restart).as_report(self.name_of(node))
                self.transport.on_report(Report(node, RESTARTED, report))

    def _check_silence(self, patience: float) -> None:
        for (kind, node), seconds in self.transport.silences().items():
            if kind == "node" and seconds > patience and not self._has_finished(node):
                raise self._node_error(
                    node, f"its agent has not been heard from for {seconds:.0f} s"
                )

    def _first_that_left(self) -> tuple[int, int] | None:
        """(node, rank) of a rank that has exited without being asked to;
        torchrun does not report exit code 0."""
        if self.transport.has_let_go:
            return None
        ranks = {(self._ranks.nodes[rank], pid): rank for rank, pid in self.transport.pids.items()}
        for node, facts in self._agent_facts().items():
            for pid in facts.get("gone", ()):
                if (node, pid) in ranks:
                    return node, ranks[node, pid]
        return None

    def _await_report(self) -> None:
        """Wait for an agent to report a rank that failed."""
        end = time.monotonic() + REPORT_WITHIN
        while time.monotonic() < end and not any(
            "rank" in facts for facts in self._agent_facts().values()
        ):
            time.sleep(0.05)

    # -- reporting ---------------------------------------------------------------------------------

    def _rank_error(self, node: int, rank: int, how: str) -> WorkerError:
        where = f"rank {rank} pid {self.transport.pids.get(rank, '?')}"
        where = f"{self.name_of(node)}, {where}" if self._has_nodes else where
        return self._error(f"rank {rank} {how}", where, self._logs / f"rank{rank}.log")

    def _node_error(self, node: int, how: str) -> WorkerError:
        ranks = self._ranks.on_node(node)
        lost = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        message = f"the node is lost, and with it {lost}: {how}"
        return self._error(message, self.name_of(node), self._logs / f"node{node}.log")

    def _error(self, message: str, where: str, log: Path) -> WorkerError:
        text = "\n".join(map(as_text, last_lines(log, LAST_LINES)))
        lines = text.splitlines()[-LAST_LINES:]  # progress bars end theirs otherwise
        hint = f"see the logs in {self._logs}"
        is_known = any(TOO_MANY in line for line in lines)
        if is_known:
            message += ": it had no descriptors left (ulimit -n)"
        if is_known or any(TERMINATED in line for line in lines):
            hint = (
                f"another program may have connected to its ports on {self._interface}, or a "
                f"component leaks files; {hint}"
            )
        if any(line.strip() for line in lines):
            message = "\n".join(
                [f"{message}; last lines of {log.name}:", *(f"  {line}" for line in lines)]
            )
        return WorkerError(message, where=where, hint=hint, code="F01")

    # -- the end -----------------------------------------------------------------------------------

    def others(self, ours: Mapping[int, object]) -> set[int]:
        """The nodes whose agents have not reported that they are done, except ours."""
        return {
            node
            for node, facts in self._agent_facts().items()
            if node not in ours and "is_over" not in facts
        }

    def dismiss(self, ours: Mapping[int, object]) -> None:
        """Tell the agents that the run has ended,
        and wait for those that we cannot end ourselves."""
        self.transport.pulses.is_over = True
        end = time.monotonic() + LEAVE_WITHIN
        while time.monotonic() < end and not self._are_dismissed(self.others(ours)):
            time.sleep(0.05)

    def _are_dismissed(self, nodes: set[int]) -> bool:
        return {("node", node) for node in nodes} <= self.transport.pulses.dismissed

    def ask_for_stacks(self, here: Sequence[ProcessRecord]) -> None:
        """Have the ranks among this machine's processes write their stacks to their logs."""
        by_pid = {process.pid: process for process in here}
        asked = {rank: by_pid[pid] for rank, pid in self.transport.pids.items() if pid in by_pid}

        def ask() -> None:
            for process in asked.values():
                process.send(signal.SIGUSR1)

        ask_for_stacks(self._logs, list(asked), ask)

    def close(self) -> None:
        self.transport.close()
        if self._has_nodes:
            shutil.rmtree(self.meeting, ignore_errors=True)


def write_for_workers(recipe: Recipe, run_dir: Path) -> None:
    """Write what agents and ranks read, in whatever folder they work."""
    from rlcli.recipe.named_files import for_any_folder

    (run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(private_file(run_dir / WORKER_FILE, os.O_TRUNC), "w") as file:
        json.dump(for_any_folder(recipe).model_dump(mode="json"), file)


def write_records(file: Path, records: list[ProcessEntry]) -> None:
    """Record all processes of a run, so that they can be ended even if their launcher cannot do
    it."""
    entries = [record._asdict() for record in records]
    with os.fdopen(private_file(file, os.O_TRUNC), "w") as opened:
        opened.write(json.dumps(entries, indent=2) + "\n")
