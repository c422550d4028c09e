"""Processes that a launcher starts on this machine: each leads a session of its own and ends with us."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcli.files import private_file
from rlcli.launch.cores import available_cores
from rlcli.launch.launcher import Death
from rlcli.processes import STOP_SIGNALS, die_with_parent
from rlcli.project import VARIABLE, current_project
from rlcli.topology.groups import PORT, Group

GONE_WITHIN = 10.0
"""Seconds that a killed process may take to be gone."""

Process = subprocess.Popen[bytes]


def start_child(command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path | None) -> Process:
    """Start a command that writes to a log of its own; `folder`: where it works, if not where we do."""
    with os.fdopen(private_file(log, os.O_APPEND), "wb") as file:
        return subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(_become_child, os.getpid()),
        )


def run_environment(ranks: int) -> dict[str, str]:
    """Cores are shared out between the ranks of this machine; components are found as they are found here."""
    environment = {"OMP_NUM_THREADS": str(max(1, available_cores() // ranks)), **os.environ, "PYTHONSAFEPATH": "1"}
    project = current_project()
    if project is not None:
        environment[VARIABLE] = str(project)
    package_home = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_home, os.environ.get("PYTHONPATH")]))
    return environment


def end_session(process: Process, grace: float = 0.0) -> None:
    """End a child with all that it has started: by SIGTERM if there is time, then by SIGKILL."""
    if grace > 0:
        _signal_session(process, signal.SIGTERM)
        _await(lambda: session_is_empty(process), grace)
    _signal_session(process, signal.SIGKILL)
    _await(lambda: session_is_empty(process), GONE_WITHIN)


def session_is_empty(process: Process) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


@dataclass(frozen=True)
class _Member:
    """A process of a group."""

    process: Process
    address: str | None


class Members:
    """The processes of servers and pools on this machine."""

    def __init__(self, logs: Path, host: str, place: Callable[[int], tuple[Mapping[str, str], Path | None]]):
        """`host`: the address that servers listen on; `place`: environment and working folder of a node's processes."""
        self._logs, self._host, self._place = logs, host, place
        self._groups: dict[str, Group] = {}
        self._members: dict[tuple[str, int], _Member] = {}

    def start(self, group: Group) -> None:
        self._groups[group.name] = group
        for index in range(len(group.nodes)):
            self._start(group, index)

    def _start(self, group: Group, index: int) -> None:
        node = group.nodes[index]
        environment, folder = self._place(node)
        port = _free_port(self._host) if PORT in " ".join(group.command) else None
        command = [word.replace(PORT, str(port)) for word in group.command]
        log = self._logs / f"{group.name}{index}.log"
        process = start_child(command, log, {**environment, **group.environment}, folder)
        address = f"{self._host}:{port}" if port is not None else None
        self._members[group.name, index] = _Member(process, address)

    def addresses(self) -> dict[tuple[str, int], str]:
        return {who: member.address for who, member in self._members.items() if member.address is not None}

    def pids(self) -> dict[tuple[str, int], int]:
        return {who: member.process.pid for who, member in self._members.items()}

    def deaths(self) -> list[Death]:
        ended = ((who, member.process.poll()) for who, member in self._members.items())
        return [
            Death(name, index, self._groups[name].nodes[index], code)
            for (name, index), code in ended
            if code is not None
        ]

    def restart(self, group: str, index: int) -> None:
        end_session(self._members.pop((group, index)).process)
        self._start(self._groups[group], index)

    def stop(self, grace: float) -> None:
        for member in self._members.values():
            _signal_session(member.process, signal.SIGTERM if grace > 0 else signal.SIGKILL)
        end = time.monotonic() + grace
        for member in self._members.values():
            _await(functools.partial(session_is_empty, member.process), end - time.monotonic())
            end_session(member.process)
        self._members.clear()


def _free_port(host: str) -> int:
    """One that nobody uses now. Should another process take it first, the server ends at once, and gets another one
    when it is replaced."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _signal_session(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _await(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def _become_child(parent: int) -> None:
    """Runs in the child between fork and exec: SIGKILL for it when its parent is gone.

    Signals that ask for an orderly stop are the parent's affair, also where a scheduler sends them to every process.
    """
    die_with_parent()
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
