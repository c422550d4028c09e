"""How jobs stand, in our words, and how to end one.

`squeue` knows the jobs that wait, run, or ended minutes ago. Older ones are in the accounts (`sacct`), if the cluster
keeps any. Of a job that neither knows there is nothing to say, and the run's own files are all there is.

A job that is known as ours is written down in the folder of its run:

    {"launcher": "slurm", "job_id": "884213", "cluster": "alps", "submitted": "2026-11-22T23:41:52+00:00", …}
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from rlcli.files import known_object, replace_file
from rlcli.launch.slurm.commands import SlurmError, ask_slurm

JOB_FILE = "job.json"
JOB_ID = re.compile(r"[1-9]\d{0,18}(_\d{1,9})?(\+\d{1,6})?")
"""`884213`; `884213_4`: of an array; `884213+1`: a component of a heterogeneous job."""

State = Literal[
    "waiting", "running", "paused", "ending", "done", "failed", "cancelled", "preempted", "out of time",
    "out of memory", "node failed", "unknown",
]  # fmt: skip
STATES: dict[str, State] = {
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting", "REQUEUE_HOLD": "waiting",
    "REQUEUE_FED": "waiting", "RESV_DEL_HOLD": "waiting", "SPECIAL_EXIT": "waiting",
    "RUNNING": "running", "SIGNALING": "running", "STAGE_OUT": "running", "RESIZING": "running",
    "SUSPENDED": "paused", "STOPPED": "paused", "COMPLETING": "ending",
    "COMPLETED": "done", "FAILED": "failed", "CANCELLED": "cancelled", "REVOKED": "cancelled",
    "PREEMPTED": "preempted", "TIMEOUT": "out of time", "DEADLINE": "out of time", "OUT_OF_MEMORY": "out of memory",
    "NODE_FAIL": "node failed", "BOOT_FAIL": "node failed",
}  # fmt: skip
"""Slurm's word → ours."""
ALIVE: tuple[State, ...] = ("waiting", "running", "paused", "ending")

QUEUE = {"JobArrayID": 40, "State": 20, "Reason": 200, "StartTime": 24, "NodeList": 4000, "RestartCnt": 10}
"""Columns of squeue, and the most characters that are of interest."""
ACCOUNTS = ("JobID", "State", "Start", "NodeList", "Restarts")
NOTHING = ("", "N/A", "None", "Unknown", "None assigned", "(null)")


@dataclass(frozen=True)
class Submission:
    """What is known of a run's job from the time that it was submitted: the content of job.json."""

    job_id: str
    cluster: str | None
    submitted: str
    """ISO time."""
    launcher: Literal["slurm"] = "slurm"
    name: str | None = None
    """Of the job."""

    @classmethod
    def read(cls, run_dir: Path) -> Submission | None:
        """Of a run; None if it is no job's, or the file is not one that we wrote."""
        known = known_object(run_dir / JOB_FILE)
        texts = {name: known.get(name) for name in ("job_id", "submitted")}
        if known.get("launcher") != "slurm" or not all(isinstance(text, str) for text in texts.values()):
            return None
        if not JOB_ID.fullmatch(str(texts["job_id"])):
            return None
        told = {one.name: known[one.name] for one in fields(cls) if one.name in known}
        for name in ("cluster", "name"):
            told[name] = told.get(name) if isinstance(told.get(name), str) else None
        return cls(**told)

    @staticmethod
    def forget(run_dir: Path) -> None:
        """The run is continued, and not as a job."""
        (run_dir / JOB_FILE).unlink(missing_ok=True)

    def write(self, run_dir: Path) -> None:
        replace_file(run_dir / JOB_FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())


@dataclass(frozen=True)
class Job:
    """How a job stands."""

    job_id: str
    state: State
    slurm_state: str
    """As Slurm calls it."""
    reason: str | None = None
    """Why it waits, or ended: `Priority`, `Resources`, `Dependency`, …"""
    starts: str | None = None
    """When it began, or is expected to (ISO, local time)."""
    nodes: str | None = None
    """As Slurm abbreviates them: `node[1-4]`."""
    restarts: int = 0
    """How often it was put back into the queue."""

    @property
    def is_alive(self) -> bool:
        """Whether it still waits or runs."""
        return self.state in ALIVE


def look_up(job_ids: Iterable[str]) -> dict[str, Job]:
    """Those of the jobs that Slurm knows, by id. Raises SlurmError if it does not answer at all."""
    wanted = [one for one in dict.fromkeys(job_ids) if JOB_ID.fullmatch(one)]
    if not wanted:
        return {}
    found = {job.job_id: job for job in _queued(wanted) if job.job_id in wanted}
    older = [one for one in wanted if one not in found]
    return found | {job.job_id: job for job in _accounted(older) if job.job_id in older}


def look_up_one(job_id: str) -> Job | None:
    """One job, if Slurm knows it. Raises SlurmError."""
    return look_up([job_id]).get(job_id)


def cancel(job_id: str, signal: str | None = None) -> None:
    """End a job, waiting or running; `signal`: have its script get this one instead (`USR1` stops a run after its
    step). Raises SlurmError."""
    if not JOB_ID.fullmatch(job_id):
        raise SlurmError(f"{job_id!r} is not the id of a job")
    ask_slurm(["scancel", *(["--batch", f"--signal={signal}"] if signal else []), job_id])


def cluster_name() -> str | None:
    """Of the cluster that jobs are submitted to; None if Slurm does not say."""
    with contextlib.suppress(SlurmError):
        for line in ask_slurm(["scontrol", "show", "config"]).splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "ClusterName":
                return value.strip()
    return None


def _queued(job_ids: Sequence[str]) -> Iterator[Job]:
    columns = ",".join(f"{name}:{width}" for name, width in QUEUE.items())
    asked = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}", f"--Format={columns}"]
    try:
        lines = ask_slurm(asked).splitlines()
    except SlurmError as error:
        if "Invalid job id" in error.what:  # which it says if it knows none of them
            return
        raise
    for line in lines:
        values, start = [], 0
        for width in QUEUE.values():
            values.append(line[start : start + width].strip())
            start += width
        yield _job(*values)


def _accounted(job_ids: Sequence[str]) -> Iterator[Job]:
    """Nothing, if the cluster keeps no accounts."""
    if not job_ids:
        return
    asked = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(job_ids)}",
             f"--format={','.join(ACCOUNTS)}"]  # fmt: skip
    with contextlib.suppress(SlurmError):
        for line in ask_slurm(asked).splitlines():
            values = line.split("|")
            if len(values) == len(ACCOUNTS):
                job_id, state, starts, nodes, restarts = values
                yield _job(job_id, state, "", starts, nodes, restarts)


def _job(job_id: str, state: str, reason: str, starts: str, nodes: str, restarts: str) -> Job:
    word = state.split()[0].rstrip("+") if state else ""  # `CANCELLED by 0`
    return Job(
        job_id, STATES.get(word, "unknown"), word, _known(reason), _known(starts), _known(nodes),
        int(restarts) if restarts.isdecimal() else 0,
    )  # fmt: skip


def _known(text: str) -> str | None:
    return None if text in NOTHING else text
