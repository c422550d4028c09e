"""The state of runs that are jobs: their files combined with the scheduler's information."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlcli.errors import ResourceError
from rlcli.launch.slurm.allocations import read_allocations
from rlcli.launch.slurm.commands import SlurmError, ask_slurm
from rlcli.launch.slurm.jobs import Job, Submission, cancel, look_up, look_up_one, of_cluster
from rlcli.launch.stop_run import StopPatience
from rlcli.observe.run_overview import DIED, UNDER_WAY, Overview, note_stop, read_overview

log = logging.getLogger(__name__)

LOOK_AGAIN = 5.0
"""Seconds between two queries to the scheduler about one run."""
FIRST_LOOK = 0.5
"""Seconds before the second query about a run that is being stopped; later ones take longer."""
STOP_SIGNAL = "USR1"
"""Signal that ends a run after its step; it reaches the run through its job script."""
ENDS_WITHIN = 90.0
"""Seconds for a cancelled job to be gone: Slurm's KillWait, and time to notice."""
WAITING = ("submitted", "waiting")
"""States in which a run has no process anywhere."""
ALIVE_STATES = {"waiting": "waiting", "paused": "paused", "ending": "stopping"}
"""A job's state → the run's, where the job says more than the run's files."""


def with_jobs(runs: Sequence[Overview]) -> list[Overview]:
    """The same runs, with the scheduler's view of their jobs. If it does not answer: a warning, and
    the files alone."""
    submissions = {run.folder: Submission.read(run.folder) for run in runs}
    open_ids: dict[str | None, list[str]] = {}
    for run in runs:
        submission = submissions[run.folder]
        if submission is not None and run.state != "done":
            open_ids.setdefault(submission.cluster, []).append(submission.job_id)
    jobs: dict[str | None, dict[str, Job]] = {}
    is_known = True
    try:
        jobs = {cluster: look_up(ids, cluster) for cluster, ids in open_ids.items()}
    except SlurmError as error:
        log.warning("the states of jobs are taken from their files: %s", error.what)
        is_known = False
    combined = []
    for run in runs:
        submission = submissions[run.folder]
        if submission is not None:
            job = jobs.get(submission.cluster, {}).get(submission.job_id)
            run = _joined(run, submission.job_id, job, is_known)
        combined.append(run)
    return combined


class Look:
    """The state of one run for frequent polling: the scheduler is queried only now and then."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._is_known = False
        self._asked = -LOOK_AGAIN

    def __call__(self, folder: Path) -> Overview | None:
        run = read_overview(folder)
        submission = Submission.read(folder) if run is not None else None
        if run is None or submission is None:
            return run
        if time.monotonic() - self._asked >= LOOK_AGAIN:
            try:
                self._job = look_up_one(submission.job_id, submission.cluster)
                self._is_known = True
            except SlurmError:
                self._job, self._is_known = None, False
            self._asked = time.monotonic()
        return _joined(run, submission.job_id, self._job, self._is_known)


def _joined(run: Overview, job_id: str, job: Job | None, is_known: bool) -> Overview:
    """A run that is a job, as far as the scheduler knows it (`is_known`: it has answered), with the
    nodes that it has or had last. While it waits it is nowhere: its files name the process that
    submitted it, or that it had before."""
    overview = _with_state(run, job_id, job, is_known)
    if overview.state in WAITING:
        return replace(overview, holder=None, host=None)
    allocations = read_allocations(run.folder) if overview.nodes is None else []
    return replace(overview, nodes=allocations[-1].nodes) if allocations else overview


def _with_state(run: Overview, job_id: str, job: Job | None, is_known: bool) -> Overview:
    """A live job says whether the run is waiting; a finished one, why a run ended that could not
    record it itself. A job that the scheduler has forgotten is over."""
    if job is None:
        if not is_known or not run.is_under_way:
            return replace(run, job=job_id)
        forgotten = (
            f"job {job_id} is not in the queue any more, and the run does not say how it ended"
        )
        return replace(run, job=job_id, state=DIED, message=forgotten)
    state, message = _of_live_job(run, job) if job.is_alive else _of_ended_job(run, job)
    return replace(run, job=job_id, state=state, message=message, nodes=job.nodes)


def _of_live_job(run: Overview, job: Job) -> tuple[str, str | None]:
    """The state of a run, and why it waits, if it does."""
    state = ALIVE_STATES.get(job.state, run.state if run.state in UNDER_WAY else "starting")
    if job.state != "waiting":
        return state, None
    start = f", starts {job.starts}" if job.starts else ""
    return state, f"{job.reason}{start}"


def _of_ended_job(run: Overview, job: Job) -> tuple[str, str | None]:
    """The state of a run, and why it ended, if it could not record that itself."""
    if run.state != "done" and job.state not in ("done", "failed", "unknown"):
        reasons = [f"its job ended: {job.slurm_state}", run.message]
        return job.state, "; ".join(filter(None, reasons))
    if run.state == "submitted":
        return DIED, (
            f"its job ended ({job.slurm_state}) before the run began: does its "
            "first node see this folder?"
        )
    if run.is_under_way:
        return DIED, f"its job is over ({job.slurm_state}), and the run does not say how it ended"
    return run.state, run.message


def stop_job(
    run: Overview, *, at_once: bool, patience: StopPatience, wait: bool, say: Callable[[str], None]
) -> bool:
    """End a run's job: after the run's step or, if that takes too long, at once. A waiting job is
    removed from the queue. Returns whether the run could finish its step. Raises SlurmError,
    ResourceError."""
    assert run.job is not None
    if run.state in ("waiting", "paused") or at_once:
        return not _cancel(run, wait)
    # Otherwise the job would treat the stop as a preemption and requeue itself.
    cluster = _cluster_of(run)
    ask_slurm(["scontrol", *of_cluster(cluster), "update", f"JobId={run.job}", "Requeue=0"])
    if run.holder is not None:
        note_stop(run.folder, run.holder)
    cancel(run.job, STOP_SIGNAL, cluster)
    if not wait:
        return True
    say(f"asked job {run.job} to stop after its step; waiting {patience}")
    return _is_over(run, patience) or not _cancel(run, wait)


def _cancel(run: Overview, wait: bool) -> bool:
    assert run.job is not None
    cancel(run.job, cluster=_cluster_of(run))
    if wait and not _is_over(run, StopPatience(ENDS_WITHIN)):
        message = f"job {run.job} is still running {ENDS_WITHIN:.0f} s after it was cancelled"
        raise ResourceError(message, where=str(run.folder), hint=f"scontrol show job {run.job}")
    return True


def _is_over(run: Overview, patience: StopPatience) -> bool:
    assert run.job is not None
    cluster, pause = _cluster_of(run), FIRST_LOOK
    while True:
        job = look_up_one(run.job, cluster)
        if job is None or not job.is_alive:
            return True
        if patience.is_over():
            return False
        time.sleep(pause)
        pause = min(LOOK_AGAIN, 2 * pause)


def _cluster_of(run: Overview) -> str | None:
    submission = Submission.read(run.folder)
    return submission.cluster if submission is not None else None
