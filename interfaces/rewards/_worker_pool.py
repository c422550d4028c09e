"""Runs tasks that may hang or crash their process in separate processes,
without harm to the run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlcli.errors import WorkerError
from rlcli.processes import start_isolated

from .._prints import show_prints
from ._process_tree import descendants_of, end_descendants_of

START_LIMIT_S = 120.0
"""A worker may first import a computer-algebra system, on a machine that may be busy."""
BUSY_SHARE = 0.01
"""A worker that has used this share of a processor is not stuck:
it is waiting for its turn on a busy machine."""
LONGEST_WAIT_S = 3600.0
"""Longest time between two checks of the deadlines; the kernel rejects a wait of many days."""
TRIES = 2
"""Tries of a task that fails: the process or the machine may be at fault, not the task."""
STARTS = 3
"""Consecutive failed starts that count as an error."""
SHARE_OF_DEADLINE = 0.8
"""Share of a call's deadline that tasks may take; the rest is for everything else in the call."""


class End(StrEnum):
    """Why a task has no reply."""

    CPU = "it used up its processor time"
    HUNG = "it neither answered nor used processor time"
    DIED = "its process ended"
    GARBLED = "it sent something other than its reply"
    LATE = "there was no time left for it"


@dataclass(frozen=True)
class TaskOutcome:
    """Outcome of a task: a reply, or the reason why there is none."""

    reply: Mapping[str, Any] = field(default_factory=dict)
    end: End | None = None


class BrokenWorker(Exception):
    """A worker that started but reports that it cannot work: in `reply`, under `broken`."""

    def __init__(self, reply: Mapping[str, Any]):
        super().__init__(str(reply["broken"]))
        self.reply = reply


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    deadline: float
    task: int | None = None
    """Number of the current task; None while starting or idle."""
    cpu_before: float = 0.0
    """Seconds of processor time used before the task."""
    cpu_seen: float = 0.0
    """Seconds of processor time used by the last deadline."""
    ready: bool = False
    buffer: bytes = b""


class _Queue:
    """The tasks of a call, and what has become of them."""

    def __init__(
        self,
        tasks: Sequence[Mapping[str, Any]],
        again: Callable[[TaskOutcome], bool],
        is_fault: Callable[[TaskOutcome], bool],
    ):
        self.tasks = tasks
        self.outcomes: list[TaskOutcome | None] = [None] * len(tasks)
        self.waiting = deque(range(len(tasks)))
        """Numbers of the tasks that no worker has."""
        self.left = len(tasks)
        """How many have no outcome yet."""
        self.faults = 0
        self._again, self._is_fault = again, is_fault
        self._tries = [0] * len(tasks)

    def record(self, number: int, outcome: TaskOutcome) -> None:
        self._tries[number] += 1
        if self._again(outcome) and self._tries[number] < TRIES:
            self.waiting.appendleft(number)
        else:
            self.outcomes[number] = outcome
            self.left -= 1
            self.faults += self._is_fault(outcome)


class WorkerPool:
    """Processes that run one script; they start with the first task and stay up for later ones.

    The script calls `serve` of `_worker.py`. It receives `settings` once, then one task after
    another, each with `cpu_s` seconds of processor time and `wall_s` of wall-clock time. A worker
    that neither replies nor uses the processor for `quiet_s` seconds of wall-clock time counts as
    hung.
    """

    def __init__(
        self,
        script: str | Sequence[str],
        *,
        workers: int,
        cpu_s: float,
        quiet_s: float,
        memory_bytes: int,
        settings: Mapping[str, Any] | None = None,
    ):
        """`script`: a file in this file's folder, or a whole command."""
        file = (
            [sys.executable, "-P", str(Path(__file__).with_name(script))]
            if isinstance(script, str)
            else script
        )
        self._command = list(file)
        self.name = Path(script).stem.strip("_") if isinstance(script, str) else "worker"
        self.n_workers = workers
        self.cpu_s = cpu_s
        self.quiet_s = quiet_s
        self.settings = {**(settings or {}), "memory_bytes": memory_bytes}
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._end = math.inf
        """When the tasks must be done."""
        self._stop = weakref.finalize(self, _stop_all, self._workers)

    def run(
        self,
        tasks: Sequence[Mapping[str, Any]],
        *,
        again: Callable[[TaskOutcome], bool],
        is_fault: Callable[[TaskOutcome], bool] = lambda _: False,
        most_faults: int = 0,
        deadline_s: float = math.inf,
    ) -> list[TaskOutcome | None]:
        """The outcome of each task, in order. A task whose outcome satisfies `again` is retried
        once, in another process. After more than `most_faults` faults the remaining tasks have no
        outcome.

        `deadline_s`: that of the call. Every task gets at least an equal share of the time until
        then, so that tasks that do nothing leave the others theirs;
        one that would end after it ends as LATE.

        Raises BrokenWorker if a worker cannot do its work at all,
        WorkerError if processes do not start.
        """
        queue = _Queue(tasks, again, is_fault)
        self._workers[:] = [worker for worker in self._workers if worker.process.poll() is None]
        self._end = time.monotonic() + SHARE_OF_DEADLINE * deadline_s
        try:
            while queue.left and queue.faults <= most_faults:
                if time.monotonic() >= self._end:
                    late = TaskOutcome(end=End.LATE)
                    return [outcome or late for outcome in queue.outcomes]
                self._hand_out(queue)
                for worker, number, outcome in self._collect():
                    if again(outcome):
                        self._bury(worker, "")
                    queue.record(number, outcome)
        finally:
            for worker in [worker for worker in self._workers if worker.task is not None]:
                self._bury(worker, "")
        return queue.outcomes

    def _hand_out(self, queue: _Queue) -> None:
        """Give tasks to idle workers, of which there are enough then."""
        while len(self._workers) < min(self.n_workers, queue.left):
            self._workers.append(self._start())
        for worker in self._workers:
            if worker.ready and worker.task is None and queue.waiting:
                number = queue.waiting.popleft()
                self._give(worker, number, queue.tasks[number], queue.left)

    def check_start(self) -> None:
        """Start one process, and end it once it is ready. Raises BrokenWorker, WorkerError."""
        try:
            while not any(worker.ready for worker in self._workers):
                if not self._workers:
                    self._workers.append(self._start())
                self._collect()
        finally:
            self.close()

    def close(self) -> None:
        """End all processes; a later `run` starts new ones."""
        _stop_all(self._workers)

    def _start(self) -> _Worker:
        worker = _Worker(
            start_isolated(self._command, OMP_NUM_THREADS="1"), time.monotonic() + START_LIMIT_S
        )
        _send(worker, {**self.settings, "parent": os.getpid()})
        return worker

    def _give(self, worker: _Worker, number: int, task: Mapping[str, Any], left: int) -> None:
        """`left`: the number of tasks that have no outcome yet."""
        now = time.monotonic()
        worker.task, worker.deadline = number, now + self.quiet_s
        worker.cpu_before = worker.cpu_seen = _cpu_seconds(worker.process.pid) or 0.0
        wall_s = min((self._end - now) * min(1.0, self.n_workers / left), LONGEST_WAIT_S)
        _send(worker, {**task, "cpu_s": min(self.cpu_s, wall_s), "wall_s": wall_s})

    def _collect(self) -> list[tuple[_Worker, int, TaskOutcome]]:
        """Wait for the next reply, exit or deadline of a worker;
        return the tasks that this completes."""
        waited_for = [
            worker for worker in self._workers if worker.task is not None or not worker.ready
        ]
        with selectors.DefaultSelector() as selector:
            for worker in waited_for:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            patience = (
                min(self._end, *(worker.deadline for worker in waited_for)) - time.monotonic()
            )
            heard = [
                key.data for key, _ in selector.select(min(max(patience, 0.0), LONGEST_WAIT_S))
            ]
        done = []
        for worker in waited_for:
            number = worker.task
            outcome = self._read(worker) if worker in heard else self._at_deadline(worker)
            if number is not None and outcome is not None:
                worker.task = None
                done.append((worker, number, outcome))
        return done

    def _read(self, worker: _Worker) -> TaskOutcome | None:
        """Read a worker's output, or notice that it has ended."""
        assert worker.process.stdout is not None
        received = os.read(worker.process.stdout.fileno(), 1 << 16)
        worker.buffer += received
        if not received:
            _stop_all([worker])
            status = worker.process.returncode
            self._bury(worker, f"exit code {status}")
            return TaskOutcome(end=End.CPU if status == -signal.SIGPROF else End.DIED)
        if not worker.buffer.endswith(b"\n"):
            return None
        try:
            reply = dict(json.loads(worker.buffer))
        except (ValueError, TypeError):
            self._bury(worker, "it wrote to the descriptor of its replies")
            return TaskOutcome(end=End.GARBLED)
        worker.buffer = b""
        return self._outcome(worker, reply)

    def _outcome(self, worker: _Worker, reply: dict[str, Any]) -> TaskOutcome:
        """What a worker's reply says. Raises BrokenWorker."""
        if not worker.ready:
            show_prints(reply.get("printed"))  # of its imports
        if "broken" in reply:
            self.close()
            raise BrokenWorker(reply)
        worker.ready, self._failed_starts = True, 0
        return TaskOutcome(end=End[reply["end"]]) if "end" in reply else TaskOutcome(reply)

    def _at_deadline(self, worker: _Worker) -> TaskOutcome | None:
        """The outcome for a silent worker; None if it may continue."""
        if time.monotonic() < worker.deadline:
            return None
        used = _cpu_seconds(worker.process.pid)
        if worker.task is not None and used is not None:
            if used - worker.cpu_before >= self.cpu_s:  # it has lifted its own limit
                self._bury(worker, "")
                return TaskOutcome(end=End.CPU)
            if used - worker.cpu_seen >= BUSY_SHARE * self.quiet_s:
                worker.cpu_seen, worker.deadline = used, time.monotonic() + self.quiet_s
                return None
        self._bury(worker, "it did not answer in time")
        return TaskOutcome(end=End.HUNG)

    def _bury(self, worker: _Worker, why: str) -> None:
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        _stop_all([worker])
        if worker.ready:
            return
        self._failed_starts += 1
        if self._failed_starts >= STARTS:
            self._failed_starts = 0
            self.close()
            raise WorkerError(
                f"a {self.name} process did not start, {STARTS} times in a row: {why}", code="F52"
            )


def _send(worker: _Worker, message: Mapping[str, Any]) -> None:
    assert worker.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed when its replies end
        worker.process.stdin.write(json.dumps(message).encode() + b"\n")
        worker.process.stdin.flush()


def _cpu_seconds(pid: int) -> float | None:
    """Processor time that a process and all that it has started have used;
    None if it no longer exists."""
    import psutil

    used = 0.0
    for number in (pid, *descendants_of(pid)):
        try:
            used += sum(psutil.Process(number).cpu_times()[:4])
        except psutil.Error:
            if number == pid:
                return None
    return used


def _stop_all(workers: list[_Worker]) -> None:
    end_processes([worker.process for worker in workers])
    workers.clear()


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill isolated processes with all that they have started, and close their pipes."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGSTOP)  # it starts nothing more
            end_descendants_of(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
