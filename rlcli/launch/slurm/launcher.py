"""Launcher within a job: the master is a process on the first node,
and one `srun` starts an agent on each node."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.run_folder import PROCESSES
from rlcli.errors import ResourceError
from rlcli.launch.children import (
    end_session,
    exit_code,
    run_environment,
    start_child,
    wait_until,
)
from rlcli.launch.launcher import Death
from rlcli.launch.node import SHARED_MEETING
from rlcli.launch.slurm.agent import SEEN_WITHIN, UNSHARED, agent_command, answer_file, offer
from rlcli.launch.slurm.allocations import job_id, node_list
from rlcli.launch.slurm.commands import SlurmError, ask_slurm
from rlcli.launch.slurm.script import parts_of
from rlcli.launch.stacks import ask_for_stacks
from rlcli.launch.world import World, write_for_workers, write_records
from rlcli.project import current_project
from rlcli.topology.groups import RANKS, Group

if TYPE_CHECKING:
    from rlcli.messaging.zmq_master import ZmqMaster
    from rlcli.recipe.schema import Recipe
    from rlcli.recipe.sections.launch import Container

LOG = "srun.log"
"""Output of srun, and of its tasks until they have their own logs."""
LOOK_SECONDS = 0.5
"""Seconds between two checks of srun's output."""
LIST_SECONDS = 1.0
"""Seconds between two listings of the folder where nodes answer."""
LEAVE_WITHIN = 5.0
"""Seconds for srun to end once its tasks have been dismissed or killed."""
ENDED = re.compile(r"^srun: error: [^:]+: tasks? (\d+)[\d,-]*: (.+)$", re.MULTILINE)
"""`srun: error: node2: task 1: Exited with exit code 7`, or `Killed`."""


class SlurmLauncher:
    """Starts all processes of a run in the job that this process is part of."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe

    def start(self, groups: Sequence[Group], run_dir: Path) -> SlurmRunning:
        if "SLURM_JOB_ID" not in os.environ:
            hint = "rlcli train and rlcli resume submit one"
            raise ResourceError(
                "this process is not part of a job", where="launch=slurm", hint=hint, code="F66"
            )
        write_for_workers(self._recipe, run_dir)
        return SlurmRunning(self._recipe, groups, run_dir)


class SlurmRunning:
    """The processes of one run."""

    def __init__(self, recipe: Recipe, groups: Sequence[Group], run_dir: Path):
        self._run_dir = run_dir
        self._answers = Answers(run_dir / SHARED_MEETING)
        self._step: SlurmStep | None = None
        ranks = next(group for group in groups if group.name == RANKS)
        names = names_of_nodes()
        self._world = World(recipe, ranks, run_dir, None, self._agent_exit, names.get)
        mark = secrets.token_hex(16)
        try:
            offer(self._world.meeting, mark)
            self._step = SlurmStep(srun_command(recipe, run_dir, mark), run_dir / "logs" / LOG)
            self._world.wait()
            write_records(run_dir / PROCESSES, self._world.records())
        except BaseException:
            self.stop(0)
            raise

    @property
    def transport(self) -> ZmqMaster:
        return self._world.transport

    def deaths(self) -> list[Death]:
        return self._world.deaths()

    def stop_signal(self) -> int | None:
        """A stop signal, unless Slurm sent it to end the remaining tasks after one has failed."""
        number = self._world.stop_signal()
        return (
            number if number is None or self._step is None or not self._step.has_failed() else None
        )

    def stop(self, grace: float, show_stacks: bool = False) -> None:
        if self._step is not None:
            if show_stacks:
                ask_for_stacks(
                    self._run_dir / "logs", list(self.transport.pids), self._step.show_stacks
                )
            self._step.wait(grace)
        self._world.dismiss({})
        if self._step is not None:
            self._step.end()
        self._world.close()

    def _agent_exit(self, node: int) -> int | None:
        """Raises ResourceError F67 for a node that has another folder at the path of the run's."""
        code = self._step.exit_of(node) if self._step is not None else None
        if code == UNSHARED or self._writes_elsewhere(node):
            message = (
                f"the node does not share the run's folder {self._run_dir} with "
                "the first one of the job"
            )
            hint = (
                "choose a --run-dir or log.dir that all nodes see; "
                f"{self._run_dir / 'logs' / LOG} says what it found"
            )
            raise ResourceError(message, where=self._world.name_of(node), hint=hint, code="F67")
        return code

    def _writes_elsewhere(self, node: int) -> bool:
        """Whether what it wrote before it was first heard from has not become visible here."""
        return self._world.has_come(node) and self._answers.is_overdue(node)


class Answers:
    """Which nodes' answers are visible here. The shared folder is listed now and then until all
    those asked about have answered, and never again: the file system does not notice how many nodes
    there are."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._seen: set[str] = set()
        self._came: dict[int, float] = {}
        """Node → when its answer was first asked about."""
        self._listed = -LIST_SECONDS

    def is_overdue(self, node: int) -> bool:
        """Whether a node that has come has been given long enough for its answer to be seen,
        in vain."""
        if (name := answer_file(self._folder, node).name) in self._seen:
            return False
        now = time.monotonic()
        came = self._came.setdefault(node, now)
        if now - self._listed >= LIST_SECONDS:
            self._listed = now
            self._seen.update(os.listdir(self._folder))
        return name not in self._seen and now - came > SEEN_WITHIN


class SlurmStep:
    """`srun`, which starts a task on each node and reports how each has ended."""

    def __init__(self, command: Sequence[str], log: Path):
        self._log = log
        log.unlink(missing_ok=True)
        self._process = start_child(command, log, step_environment(), None)
        self._looked = 0.0
        self._first: tuple[int, int] | None = None
        """The task that ended first, and its exit code."""

    def exit_of(self, task: int) -> int | None:
        """The exit code of the task if it was the first to fail;
        of any task once srun has ended."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self.has_failed()
        if self._first is not None:
            return self._first[1] if self._first[0] == task else None
        return exit_code(self._process)

    def has_failed(self) -> bool:
        """Whether a task has failed, according to srun's output so far."""
        if self._first is None:
            self._looked = time.monotonic()
            self._first = first_to_fail(self._log.read_text(errors="replace"))
        return self._first is not None

    def show_stacks(self) -> None:
        """Send SIGUSR1, which srun passes on to all processes of its tasks:
        ranks then write their stacks."""
        self._process.send_signal(signal.SIGUSR1)

    def wait(self, seconds: float) -> bool:
        return wait_until(lambda: exit_code(self._process) is not None, seconds)

    def end(self) -> None:
        """End the step: dismissed tasks exit by themselves; Slurm kills those that do not,
        on any node."""
        if not self.wait(LEAVE_WITHIN):
            with contextlib.suppress(SlurmError):  # the job may be over
                ask_slurm(["scancel", "--signal=KILL", job_id()])
            self.wait(LEAVE_WITHIN)
        end_session(self._process)


def first_to_fail(text: str) -> tuple[int, int] | None:
    """The number of the task that srun reported first, and its exit code;
    a negative one is a signal."""
    match = ENDED.search(text)
    if match is None:
        return None
    how = match[2]
    if code := re.fullmatch(r"Exited with exit code (\d+)", how):
        return int(match[1]), int(code[1])
    names = {signal.strsignal(number): -number for number in signal.valid_signals()}
    return int(match[1]), names.get(how.removesuffix(" (core dumped)"), -signal.SIGKILL)


def names_of_nodes() -> dict[int, str]:
    """Node → Slurm's name for its machine, which `launch.slurm.exclude` takes;
    empty if Slurm does not say."""
    with contextlib.suppress(SlurmError):
        return dict(
            enumerate(ask_slurm(["scontrol", "show", "hostnames", node_list(os.environ)]).split())
        )
    return {}


def step_environment() -> dict[str, str]:
    """Agents divide the cores of their own node among ranks,
    unless the user has set the number of threads."""
    environment = run_environment(1)
    if "OMP_NUM_THREADS" not in os.environ:
        del environment["OMP_NUM_THREADS"]
    return environment


def srun_command(recipe: Recipe, run_dir: Path, mark: str) -> list[str]:
    """The command for one task per node; when one fails, Slurm ends the others. They do not wait
    for the cores of an earlier step, which Slurm may not know to have ended."""
    container, parts = recipe.launch.slurm.container, parts_of(recipe)
    task = agent_command(container.python or sys.executable, run_dir, mark)
    options, inside = _contained(container, run_dir)
    command = ["srun"]
    for index, nodes in enumerate(parts):
        variable = "SLURM_CPUS_PER_TASK"
        if index:
            command.append(":")
        if len(parts) > 1:
            variable += f"_HET_GROUP_{index}"
            command.append(f"--het-group={index}")
        cores = os.environ.get(variable)
        command += [
            f"--nodes={nodes.nodes}",
            f"--ntasks={nodes.nodes}",
            "--ntasks-per-node=1",
            "--overlap",
            "--kill-on-bad-exit=1",
            "--mpi=none",
            "--input=none",
            # the job's variables, even if it has none of those of whoever submitted it
            "--export=ALL",
            *([f"--cpus-per-task={cores}"] if cores else []),
            *options,
            *inside,
            *task,
        ]
    return command


def _contained(container: Container, run_dir: Path) -> tuple[list[str], list[str]]:
    """Options of srun, and the prefix of the task's command."""
    if container.engine == "none":
        return [], []
    project = current_project()
    folders = [run_dir.absolute(), *([project] if project is not None else [])]
    mounts = [*(f"{folder}:{folder}" for folder in folders), *container.mounts]
    if container.engine == "pyxis":
        image = f"--container-image={container.image}"
        return [image, f"--container-mounts={','.join(mounts)}", *container.options], []
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return [], ["apptainer", "exec", *binds, *container.options, str(container.image)]
