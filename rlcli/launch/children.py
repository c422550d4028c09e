"""Processes that a launcher starts on this machine: each leads its own session and ends with this
process."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlcli.files import make_folder, private_file, replace_file
from rlcli.inspect.cores import available_cores
from rlcli.launch.launcher import Death, Restart
from rlcli.launch.server import agent_command
from rlcli.processes import STOP_SIGNALS, die_with_parent, ended_how, start_time
from rlcli.project import VARIABLE, current_project
from rlcli.server_slot import ServerSlot
from rlcli.topology.groups import GIVEN_UP, LAST_EXIT, Group, process_folder

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Seconds between two checks of which processes are alive."""
REPLACEMENTS, REPLACED_WITHIN = 3, 6 * 3600.0
"""How often a process that dies is started again within these seconds: long enough for those that
die while they load, and no limit on how long a run may be."""
GONE_WITHIN = 10.0
"""Seconds that a killed process may take to disappear."""

Process = subprocess.Popen[bytes]


def start_child(
    command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path | None
) -> Process:
    """Start a command that writes to its own log; `folder`: its working directory, if not ours."""
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
    """Variables that divide the cores among this machine's ranks and let them find the same
    components."""
    environment = {
        "OMP_NUM_THREADS": str(max(1, available_cores() // ranks)),
        **os.environ,
        "PYTHONSAFEPATH": "1",
    }
    project = current_project()
    if project is not None:
        environment[VARIABLE] = str(project)
    package_home = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [package_home, os.environ.get("PYTHONPATH")])
    )
    return environment


def exit_code(process: Process) -> int | None:
    """The exit code of a child; None while it runs. What it has started is ended with it: once its
    exit code is read, its number may become another process's."""
    if process.returncode is None and start_time(process.pid) is None:
        end_session(process)
    return process.returncode


def end_session(process: Process) -> None:
    """End a child and everything it has started, unless that was done before."""
    if process.returncode is None:
        _kill_session(process)
        wait_until(lambda: _session_is_empty(process), GONE_WITHIN)


def _session_is_empty(process: Process) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):  # its number is another user's now
        return True
    return False


def _kill_session(process: Process) -> None:
    # macOS refuses a signal to a group of which only an exit code is left
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition comes true within some seconds."""
    end = time.monotonic() + seconds
    while not (is_so := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return is_so


class Members:
    """The processes of a node other than its ranks: the agents of its servers, and those of its
    pools. One that dies is replaced, up to `REPLACEMENTS` times within `REPLACED_WITHIN` s."""

    def __init__(self, run_dir: Path, environment: Mapping[str, str], folder: Path | None = None):
        """`folder`: their working directory, if not ours."""
        self._run_dir, self._environment, self._folder = run_dir, environment, folder
        self._commands: dict[tuple[str, int], tuple[Group, list[str]]] = {}
        self._processes: dict[tuple[str, int], Process] = {}
        self._replaced: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        """When it was replaced within the last `REPLACED_WITHIN` seconds."""
        self._given_up: dict[tuple[str, int], Death] = {}
        self._slots: dict[tuple[str, int], ServerSlot] = {}
        self._restarts: deque[Restart] = deque()
        self._servers: Counter[tuple[str, int]] = Counter()
        """How many servers were started again there."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="members", daemon=True)

    def start(self, groups: Sequence[Group], node: int) -> None:
        """Start the processes of a node. Called once."""
        for group in groups:
            for index in group.on_node(node) if group.kind != "ranks" else ():
                self._commands[group.name, index] = group, self._command(group, index)
                if group.kind == "server":
                    self._slots[group.name, index] = ServerSlot(self._folder_of(group, index))
        if self._commands:
            make_folder(self._run_dir / "logs")
            for who in self._commands:
                self._start(who)
            self._thread.start()

    def _command(self, group: Group, index: int) -> list[str]:
        folder = self._folder_of(group, index)
        shutil.rmtree(folder, ignore_errors=True)  # from an earlier start of this run
        make_folder(folder)
        return (
            agent_command(folder)
            if group.kind == "server"
            else [*group.command, str(self._run_dir), str(index)]
        )

    def _folder_of(self, group: Group, index: int) -> Path:
        return process_folder(self._run_dir, group.kind, group.name, index)

    def _start(self, who: tuple[str, int]) -> None:
        group, command = self._commands[who]
        before = self._processes.get(who)
        last_exit = {LAST_EXIT: str(before.returncode)} if before is not None else {}
        environment = {**self._environment, **group.environment, **last_exit}
        process = start_child(command, self.log(*who), environment, self._folder)
        if before is not None and who not in self._slots:
            self._restarts.append(Restart(*who, ended_how(before.returncode)))
        self._processes[who] = process

    def log(self, group: str, index: int) -> Path:
        """The log of a process."""
        return self._run_dir / "logs" / f"{group}{index}.log"

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            for who, process in list(self._processes.items()):
                if who not in self._given_up and exit_code(process) is not None:
                    self._replace(who)
            for who, slot in self._slots.items():
                # the others are restarted with it
                if who[1] % self._commands[who][0].processes_of_each == 0:
                    self._note_servers(who, slot)

    def _note_servers(self, who: tuple[str, int], slot: ServerSlot) -> None:
        """Note the servers that were started again there since the last check, at their client's
        request."""
        serves = slot.serves
        while serves is not None and self._servers[who] < serves.starts - 1:
            self._servers[who] += 1
            self._restarts.append(Restart(*who, serves.before))

    def _replace(self, who: tuple[str, int]) -> None:
        now = time.monotonic()
        recently = [at for at in self._replaced[who] if now - at < REPLACED_WITHIN]
        if len(recently) < REPLACEMENTS:
            self._replaced[who] = [*recently, now]
            try:
                self._start(who)
            except (OSError, subprocess.SubprocessError) as error:
                # counts like a death of the new process: the next check finds the old one ended
                log.warning("%s%d cannot be started again: %s", *who, error)
            return
        group = self._commands[who][0]
        death = Death(*who, group.nodes[who[1]], self._processes[who].returncode)
        self._given_up[who] = death
        often = f"{death}, {REPLACEMENTS + 1} times"
        if who in self._slots:  # its client may be waiting for it
            self._slots[who].give_up(f"what runs it {often} (see {self.log(*who)})")
        else:
            replace_file(self._folder_of(group, who[1]) / GIVEN_UP, often.encode())

    def pids(self) -> dict[tuple[str, int], int]:
        return {who: process.pid for who, process in self._processes.items()}

    def deaths(self) -> list[Death]:
        """Deaths of processes that are no longer replaced."""
        return list(self._given_up.values())

    def new_restarts(self) -> list[Restart]:
        """The servers and processes of pools that were started again since this was last called."""
        return [self._restarts.popleft() for _ in range(len(self._restarts))]

    def stop(self) -> None:
        """End them at once: they have nothing to finish."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for process in self._processes.values():
            if process.returncode is None:
                _kill_session(process)
        for process in self._processes.values():
            end_session(process)
        self._processes.clear()


def _become_child(parent: int) -> None:
    """Runs in the child between fork and exec, so that it is killed when its parent is gone.

    Stop signals are handled by the parent, even if a scheduler sends them to every process.
    """
    die_with_parent()
    if os.getppid() != parent:  # it had already exited
        os._exit(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
