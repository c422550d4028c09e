"""The state of jobs, in rlcli's words, and how to end one.

`squeue` knows the jobs that are waiting, running, or ended minutes ago. Older ones are in the
accounting (`sacct`), if the cluster keeps one. For a job that neither knows, only the run's own
files are available.

A job that rlcli submitted is recorded in the folder of its run:

    {"launcher": "slurm", "job_id": "884213", "cluster": "alps",
     "submitted": "2026-11-22T23:41:52+00:00", …}
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from rlcli.files import known_object, replace_file
from rlcli.launch.slurm.commands import SlurmError, ask_slurm

log = logging.getLogger(__name__)

JOB_FILE = "job.json"
JOB_ID = re.compile(r"[1-9]\d{0,18}(_\d{1,9})?")
"""`884213`; `884213_4`: part of an array."""

State = Literal[
    "waiting",
    "running",
    "paused",
    "ending",
    "done",
    "failed",
    "cancelled",
    "preempted",
    "out of time",
    "out of memory",
    "node failed",
    "unknown",
]
STATES: dict[str, State] = {
    "PENDING": "waiting",
    "CONFIGURING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "REQUEUE_FED": "waiting",
    "RESV_DEL_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting",
    "RUNNING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "RESIZING": "running",
    "SUSPENDED": "paused",
    "STOPPED": "paused",
    "COMPLETING": "ending",
    "COMPLETED": "done",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "preempted",
    "TIMEOUT": "out of time",
    "DEADLINE": "out of time",
    "OUT_OF_MEMORY": "out of memory",
    "NODE_FAIL": "node failed",
    "BOOT_FAIL": "node failed",
}
"""Slurm's state → rlcli's."""
ALIVE: tuple[State, ...] = ("waiting", "running", "paused", "ending")

QUEUE = {
    "JobArrayID": 40,
    "State": 20,
    "Reason": 200,
    "StartTime": 24,
    "NodeList": 4000,
    "RestartCnt": 10,
}
"""Columns of squeue, and their maximum width in characters."""
ACCOUNTS = ("JobID", "State", "Start", "NodeList")
"""Columns of sacct, of those that every version has: it refuses all if it does not know one (22.05:
`Restarts`)."""
NO_ACCOUNTS = "accounting storage is disabled"
NOTHING = ("", "N/A", "None", "Unknown", "None assigned", "(null)")


@dataclass(frozen=True)
class Submission:
    """What was recorded about a run's job when it was submitted: the content of job.json."""

    job_id: str
    cluster: str | None
    """Its cluster, if that was chosen in `launch.slurm.options`; None: the one of this machine."""
    submitted: str
    """ISO time."""
    launcher: Literal["slurm"] = "slurm"
    name: str | None = None
    """Name of the job."""

    @classmethod
    def read(cls, run_dir: Path) -> Submission | None:
        """Read the submission of a run; None if it is not a job,
        or the file was not written by rlcli."""
        recorded = known_object(run_dir / JOB_FILE)
        texts = {name: recorded.get(name) for name in ("job_id", "submitted")}
        if recorded.get("launcher") != "slurm" or not all(
            isinstance(text, str) for text in texts.values()
        ):
            return None
        if not JOB_ID.fullmatch(str(texts["job_id"])):
            return None
        values = {
            field.name: recorded[field.name] for field in fields(cls) if field.name in recorded
        }
        for name in ("cluster", "name"):
            values[name] = values.get(name) if isinstance(values.get(name), str) else None
        return cls(**values)

    @staticmethod
    def forget(run_dir: Path) -> None:
        """Remove job.json, because the run is continued, but not as a job."""
        (run_dir / JOB_FILE).unlink(missing_ok=True)

    def write(self, run_dir: Path) -> None:
        replace_file(run_dir / JOB_FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())


@dataclass(frozen=True)
class Job:
    """The state of a job."""

    job_id: str
    state: State
    slurm_state: str
    """The state's name in Slurm."""
    reason: str | None = None
    """Why it is waiting, or ended: `Priority`, `Resources`, `Dependency`, …"""
    starts: str | None = None
    """When it began, or is expected to (ISO, local time)."""
    nodes: str | None = None
    """As Slurm abbreviates them: `node[1-4]`."""
    restarts: int = 0
    """How often it was requeued; 0 once only the accounting knows it."""

    @property
    def is_alive(self) -> bool:
        """Whether it is still waiting or running."""
        return self.state in ALIVE


def look_up(job_ids: Iterable[str], cluster: str | None = None) -> dict[str, Job]:
    """The given jobs that Slurm knows, by id; `cluster`: as in `Submission`. Raises SlurmError if
    it does not answer at all."""
    ids = [job_id for job_id in dict.fromkeys(job_ids) if JOB_ID.fullmatch(job_id)]
    if not ids:
        return {}
    jobs = _whole(_queued(ids, cluster), ids)
    older = [job_id for job_id in ids if job_id not in jobs]
    return jobs | _whole(_accounted(older, cluster), older)


def look_up_one(job_id: str, cluster: str | None = None) -> Job | None:
    """One job, if Slurm knows it. Raises SlurmError."""
    return look_up([job_id], cluster).get(job_id)


def cancel(job_id: str, signal: str | None = None, cluster: str | None = None) -> None:
    """End a waiting or running job; `signal`: send its script this signal instead (`USR1` stops a
    run after its step). Raises SlurmError."""
    if not JOB_ID.fullmatch(job_id):
        raise SlurmError(f"{job_id!r} is not the id of a job")
    options = ["--batch", f"--signal={signal}"] if signal else []
    ask_slurm(["scancel", *of_cluster(cluster), *options, job_id])


def of_cluster(cluster: str | None) -> list[str]:
    """The option of Slurm's commands that chooses a cluster."""
    return [f"--clusters={cluster}"] if cluster else []


def _whole(jobs: Iterable[Job], ids: Sequence[str]) -> dict[str, Job]:
    """The wanted jobs by id; a heterogeneous one, whose parts Slurm lists,
    has the state of its first part."""
    by_id: dict[str, Job] = {}
    for job in jobs:
        own_id, component, _ = job.job_id.partition("+")
        if own_id in ids and (not component or own_id not in by_id):
            by_id[own_id] = replace(job, job_id=own_id)
        elif own_id in by_id:
            nodes = [nodes for nodes in (by_id[own_id].nodes, job.nodes) if nodes is not None]
            by_id[own_id] = replace(by_id[own_id], nodes=",".join(nodes) or None)
    return by_id


def _queued(job_ids: Sequence[str], cluster: str | None) -> Iterator[Job]:
    columns = ",".join(f"{name}:{width}" for name, width in QUEUE.items())
    asked = [
        "squeue",
        *of_cluster(cluster),
        "--noheader",
        "--array",
        "--states=all",
        f"--jobs={','.join(job_ids)}",
        f"--Format={columns}",
    ]
    try:
        lines = ask_slurm(asked).splitlines()
    except SlurmError as error:
        if "Invalid job id" in error.what:  # the message if it knows none of them
            return
        raise
    for line in lines:
        if line.startswith("CLUSTER: "):  # above the jobs of a chosen cluster, header or not
            continue
        values, start = [], 0
        for width in QUEUE.values():
            values.append(line[start : start + width].strip())
            start += width
        yield _job(*values)


def _accounted(job_ids: Sequence[str], cluster: str | None) -> Iterator[Job]:
    """Jobs from the accounting; none, with a warning unless the cluster keeps no accounting, if it
    does not answer."""
    if not job_ids:
        return
    asked = [
        "sacct",
        *of_cluster(cluster),
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={','.join(job_ids)}",
        f"--format={','.join(ACCOUNTS)}",
    ]
    try:
        lines = ask_slurm(asked).splitlines()
    except SlurmError as error:
        if NO_ACCOUNTS not in error.what:
            _warn(error.what)
        return
    for line in lines:
        values = line.split("|")
        if len(values) == len(ACCOUNTS):
            job_id, state, starts, nodes = values
            yield _job(job_id, state, "", starts, nodes, "")


@functools.cache
def _warn(reason: str) -> None:
    """Once per process, for a live view asks again and again."""
    log.warning("how older jobs ended is known only from the files of their runs: %s", reason)


def _job(job_id: str, state: str, reason: str, starts: str, nodes: str, restarts: str) -> Job:
    word = state.split()[0].rstrip("+") if state else ""  # `CANCELLED by 0`
    return Job(
        job_id,
        STATES.get(word, "unknown"),
        word,
        _known(reason),
        _known(starts),
        _known(nodes),
        int(restarts) if restarts.isdecimal() else 0,
    )


def _known(text: str) -> str | None:
    return None if text in NOTHING else text
