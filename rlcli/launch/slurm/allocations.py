"""Allocations of a job: the nodes it has from the time it begins until it ends or is requeued.

Each allocation is a line of job.allocations.jsonl, written as it begins. These lines reveal a run
that is requeued again and again without making progress, whatever ended its allocations: the time
limit, a preemption, a node failure or rlcli itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from rlcli.api.run_folder import CHECKPOINTS, LOCK
from rlcli.errors import RlcliError, Stopped, WorkerError
from rlcli.files import private_file, read_text
from rlcli.launch.slurm.commands import SlurmError, ask_slurm
from rlcli.launch.stop_run import STEPS, grace_of
from rlcli.observe.metrics import records_of
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_lock import read_holder
from rlcli.observe.run_overview import is_asked_to_stop
from rlcli.observe.run_record import read_committed
from rlcli.observe.tail import Tail
from rlcli.processes import STOP_SIGNALS

log = logging.getLogger(__name__)

ALLOCATIONS_FILE = "job.allocations.jsonl"
KILLED = tuple(128 + number for number in STOP_SIGNALS if number != signal.SIGINT)
AGAIN = (75, 7, 8, *KILLED)
"""Exit codes after which a run is requeued: it was asked to stop, a process died, a deadline
passed, or a scheduler's signal ended it because it could not handle it yet, or came twice."""
LEAD = 900
"""Seconds before its end at which a run is warned while no steps have been measured."""
SAVES = 2
"""How many times the longest writing of a checkpoint must fit before the end: after the checkpoint
the models are saved, and storage is not always equally fast."""
LOOK_SECONDS = 5.0
"""Seconds between two checks of how long the steps take."""


@dataclass(frozen=True)
class Allocation:
    """A line of job.allocations.jsonl."""

    job: str
    restart: int
    """How often the job had been requeued."""
    started: str
    """ISO time."""
    nodes: str
    """As Slurm abbreviates them."""
    step: int | None
    """The last step that was committed when it began."""


def read_allocations(run_dir: Path) -> list[Allocation]:
    """All allocations of a run, as far as they can be read."""
    allocations = []
    with contextlib.suppress(OSError):
        for line in read_text(run_dir / ALLOCATIONS_FILE).splitlines():
            with contextlib.suppress(ValueError, TypeError):
                allocations.append(Allocation(**json.loads(line)))
    return allocations


def run_in_allocation(run_dir: Path, work: Callable[[], int], requeues: int) -> int:
    """Continue a run in the job whose script this process is, by `work`, which returns its exit
    code. Puts the job back into the queue where that helps. A run that `rlcli stop` has ended is no
    failure of its job. Raises the errors of `work`, and WorkerError F68 if it is time to give
    up."""
    _note(run_dir)
    _refuse_without_progress(run_dir, requeues)
    try:
        with _warned_in_time(run_dir):
            code = work()
    except RlcliError as error:
        if error.exit_code in AGAIN:
            _put_back(run_dir, error.exit_code, requeues)
        raise
    if code == Stopped.exit_code and _was_stopped(run_dir):
        return 0
    if code in AGAIN:
        _put_back(run_dir, code, requeues)
    return code


def lead_of(run_dir: Path, limit: float | None) -> int:
    """Seconds before its end at which a run must be warned, to finish a step and save: the time of
    its last steps and of its checkpoints, with a margin. `limit`: the job's time in seconds; at
    most a quarter of it is used, or half once steps are known."""
    measured = records_of(Tail(run_dir / "metrics.jsonl").last(STEPS))
    lead = grace_of(measured) + SAVES * _seconds_of_writing(run_dir) if measured else float(LEAD)
    return max(1, round(lead if limit is None else min(lead, limit / (2 if measured else 4))))


def _seconds_of_writing(run_dir: Path) -> float:
    """How long the files of a checkpoint took that are written while steps go on, at most: of those
    that are there, from the state, which is written first, to the manifest."""
    from rlcli.checkpoint.manifest import MANIFEST
    from rlcli.checkpoint.run_state import STATE
    from rlcli.checkpoint.verify import checkpoints_in

    longest = 0.0
    with contextlib.suppress(OSError, RlcliError):  # one is just being removed
        for checkpoint in checkpoints_in(run_dir / CHECKPOINTS):
            began, ended = (checkpoint.joinpath(file).stat().st_mtime for file in (STATE, MANIFEST))
            longest = max(longest, ended - began)
    return longest


def allocations_without_progress(run_dir: Path) -> int:
    """How many of the last allocations of a job began at the step that is committed now."""
    allocations, step = read_allocations(run_dir), _committed(run_dir)
    job = allocations[-1].job if allocations else None
    last = takewhile(
        lambda allocation: (allocation.step, allocation.job) == (step, job), reversed(allocations)
    )
    return len(list(last))


def _note(run_dir: Path) -> None:
    environment: Mapping[str, str] = os.environ
    allocation = Allocation(
        job=job_id(),
        restart=int(environment.get("SLURM_RESTART_COUNT") or 0),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        nodes=node_list(environment),
        step=_committed(run_dir),
    )
    with os.fdopen(private_file(run_dir / ALLOCATIONS_FILE, os.O_APPEND), "wb") as file:
        file.write((json.dumps(asdict(allocation)) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def _refuse_without_progress(run_dir: Path, requeues: int) -> None:
    """Raises WorkerError F68, and records it, if the job has been requeued too often since the last
    commit."""
    if allocations_without_progress(run_dir) > requeues + 1:
        raise _give_up(run_dir, requeues)


def _put_back(run_dir: Path, code: int, requeues: int) -> None:
    """Requeue the job, unless somebody has stopped the run,
    which is also recorded in the job (`Requeue=0`)."""
    if _was_stopped(run_dir):
        return
    if allocations_without_progress(run_dir) > requeues:
        if code == Stopped.exit_code:
            raise _give_up(run_dir, requeues)
        log.warning("the job is not requeued again (launch.slurm.requeues is %d)", requeues)
        return
    try:
        if _of_this_job("State") != "RUNNING":
            return  # Slurm has ended it, and perhaps requeued it; a second requeue would confuse it
        ask_slurm(["scontrol", "requeue", job_id()])
    except SlurmError as error:
        log.warning("the job is not requeued: %s", error.what)


def _was_stopped(run_dir: Path) -> bool:
    """Whether `rlcli stop` has asked this start of the run to end."""
    holder = read_holder(run_dir / LOCK)
    return holder is not None and is_asked_to_stop(run_dir, holder)


def _give_up(run_dir: Path, requeues: int) -> WorkerError:
    """Record that this was the last allocation."""
    step = _committed(run_dir)
    newer = "any checkpoint" if step is None else f"a checkpoint newer than step {step}"
    times = {0: "was not to be", 1: "was once"}.get(requeues, f"was {requeues} times in a row")
    message = f"the job {times} requeued without {newer}"
    hint = "rlcli logs shows why; launch.slurm.requeues is the limit"
    error = WorkerError(message, where=str(run_dir), hint=hint, code="F68")
    with RunDirectory.reopen(run_dir) as run:
        run.write_failure(error.exit_code, str(error))
    return error


@contextmanager
def _warned_in_time(run_dir: Path) -> Iterator[None]:
    """Context in which this process gets SIGUSR1 as long before the job's end as its steps need, as
    measured so far. The time of Slurm's own signal was fixed when the job was submitted."""
    left = _seconds_left()
    over = threading.Event()
    if left is not None:
        end = time.monotonic() + left

        def watch() -> None:
            while not over.wait(LOOK_SECONDS):
                if time.monotonic() >= end - lead_of(run_dir, left):
                    os.kill(os.getpid(), signal.SIGUSR1)
                    return

        threading.Thread(target=watch, name="time limit", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _seconds_left() -> float | None:
    """Seconds until the job's time is up; None if it has no limit, or Slurm does not report one."""
    try:
        text = _of_this_job("TimeLeft")
        days, _, clock = text.rpartition("-")
        figures = [int(figure) for figure in clock.split(":")]
    except (SlurmError, ValueError):  # UNLIMITED, NOT_SET
        return None
    return int(days or 0) * 86400.0 + sum(
        figure * 60**power for power, figure in enumerate(reversed(figures))
    )


def _committed(run_dir: Path) -> int | None:
    committed = read_committed(run_dir)
    return committed.step if committed is not None else None


def _of_this_job(column: str) -> str:
    """A column of squeue for this job; of a heterogeneous one, for its first part.
    Raises SlurmError."""
    lines = ask_slurm(
        ["squeue", "--noheader", f"--jobs={job_id()}", f"--Format={column}:20"]
    ).splitlines()
    return lines[0].strip() if lines else ""


def node_list(environment: Mapping[str, str]) -> str:
    """The nodes of this job, as Slurm abbreviates them, in the order of its tasks."""
    suffixes = [
        f"_HET_GROUP_{index}" for index in range(int(environment.get("SLURM_HET_SIZE") or 0))
    ]
    return ",".join(
        environment.get(f"SLURM_JOB_NODELIST{suffix}", "") for suffix in suffixes or [""]
    )


def job_id() -> str:
    """The id by which Slurm's commands know this job alone. The number of one job of an array is
    that of the whole array, and a command that is given it acts on all of them."""
    if (number := os.environ.get("SLURM_ARRAY_TASK_ID")) is not None:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{number}"
    return os.environ["SLURM_JOB_ID"]
