"""Symbolic comparison in processes of its own, which an expression may hang or break without harm to the run."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.errors import ModelError, WorkerError
from rlcli.interfaces._answers import Comparison, Verdict
from rlcli.processes import start_isolated

START_LIMIT_S = 120.0
"""A worker imports a computer-algebra system first, on a machine that may be busy."""

WALL_FACTOR = 30
"""Seconds by the clock for each second of processor time: a worker that has not answered by then is stuck."""

LONGEST_WAIT_S = 3600.0
"""Between two looks at the deadlines; the kernel takes no wait of many days."""

TRIES = 2
"""Of a comparison whose process dies: it may be the machine that killed it, short of memory, and not the answer."""
STARTS = 3
"""Failed starts in a row that are an error."""

_VERDICTS = {
    "unparsed": Verdict.UNPARSED,
    "crashed": Verdict.CRASHED,
    "no_gold": Verdict.NO_GOLD,
}


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    deadline: float
    task: int | None = None
    """Number of the comparison at work; None while starting or idle."""
    ready: bool = False
    buffer: bytes = b""


class MathPool:
    """Compares expressions with math-verify. Processes start at the first call and stay for later ones."""

    def __init__(self, n_workers: int, limit_s: float, command: Sequence[str] | None = None):
        script = Path(__file__).with_name("_math_worker.py")
        self.n_workers = n_workers
        self.limit_s = limit_s
        self._command = list(command or [sys.executable, "-P", str(script), str(os.getpid())])
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._stop = weakref.finalize(self, _stop_all, self._workers)

    def compare(self, pairs: Sequence[Comparison]) -> list[Verdict]:
        """A verdict for each, in order.

        What an answer does to its workers, again and again, is a verdict on the answer. Raises ModelError where
        math-verify cannot be imported, WorkerError where processes do not start.
        """
        verdicts: list[Verdict | None] = [None] * len(pairs)
        waiting = deque(range(len(pairs)))
        deaths = [0] * len(pairs)
        self._workers[:] = [worker for worker in self._workers if worker.process.poll() is None]
        while waiting or any(worker.task is not None for worker in self._workers):
            while len(self._workers) < min(self.n_workers, len(waiting) + self._busy()):
                self._workers.append(self._start())
            for worker in self._workers:
                if worker.ready and worker.task is None and waiting:
                    self._give(worker, waiting.popleft(), pairs)
            for task in self._collect(verdicts):
                deaths[task] += 1
                if deaths[task] < TRIES:
                    waiting.append(task)
        return [verdict or Verdict.CRASHED for verdict in verdicts]

    def close(self) -> None:
        """End all processes; a later `compare` starts new ones."""
        _stop_all(self._workers)

    def _busy(self) -> int:
        return sum(worker.task is not None for worker in self._workers)

    def _start(self) -> _Worker:
        process = start_isolated(self._command, OMP_NUM_THREADS="1")
        return _Worker(process, deadline=time.monotonic() + START_LIMIT_S)

    def _give(self, worker: _Worker, number: int, pairs: Sequence[Comparison]) -> None:
        pair = pairs[number]
        task = json.dumps({"answer": pair.answer, "expected": pair.expected, "limit_s": self.limit_s}) + "\n"
        worker.task, worker.deadline = number, time.monotonic() + WALL_FACTOR * self.limit_s
        assert worker.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a worker that died is noticed when its replies end
            worker.process.stdin.write(task.encode())
            worker.process.stdin.flush()

    def _collect(self, verdicts: list[Verdict | None]) -> list[int]:
        """Wait for the next reply, death or deadline; the comparisons whose workers died."""
        waited_for = [worker for worker in self._workers if worker.task is not None or not worker.ready]
        with selectors.DefaultSelector() as selector:
            for worker in waited_for:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            patience = min(worker.deadline for worker in waited_for) - time.monotonic()
            heard = [key.data for key, _ in selector.select(max(patience, 0.0))]
        died = [worker.task for worker in heard if not self._read(worker, verdicts) and worker.task is not None]
        for worker in waited_for:
            if worker in self._workers and (worker.task is not None or not worker.ready):
                self._check_deadline(worker, verdicts)
        return died

    def _read(self, worker: _Worker, verdicts: list[Verdict | None]) -> bool:
        """Take what the worker says; False if it died without a verdict."""
        assert worker.process.stdout is not None
        received = os.read(worker.process.stdout.fileno(), 1 << 16)
        worker.buffer += received
        if not received:
            status = worker.process.wait()
            if status == -signal.SIGPROF and worker.task is not None:
                verdicts[worker.task] = Verdict.TIMEOUT
                worker.task = None
            self._bury(worker, f"exit code {status}")
            return False
        if worker.buffer.endswith(b"\n"):
            reply, worker.buffer = json.loads(worker.buffer), b""
            if "broken" in reply:
                self.close()
                raise ModelError(
                    f"math-verify cannot be imported: {reply['broken']}",
                    hint="pip install math-verify",
                    code="F51",
                )
            if worker.task is not None:
                verdicts[worker.task] = _verdict(reply)
            worker.ready, worker.task, self._failed_starts = True, None, 0
        return True

    def _check_deadline(self, worker: _Worker, verdicts: list[Verdict | None]) -> None:
        if time.monotonic() >= worker.deadline:
            if worker.task is not None:
                verdicts[worker.task] = Verdict.TIMEOUT
            self._bury(worker, "it said nothing for too long")

    def _bury(self, worker: _Worker, why: str) -> None:
        _stop_all([worker])
        self._workers.remove(worker)
        if worker.ready:
            return
        self._failed_starts += 1
        if self._failed_starts >= STARTS:
            self._failed_starts = 0
            self.close()
            raise WorkerError(f"a math-verify process did not start, {STARTS} times in a row: {why}", code="F52")


def _verdict(reply: dict[str, Any]) -> Verdict:
    if "equal" in reply:
        return Verdict.RIGHT if reply["equal"] else Verdict.WRONG
    return next(verdict for name, verdict in _VERDICTS.items() if name in reply)


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
        for pipe in (worker.process.stdin, worker.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
    workers.clear()
