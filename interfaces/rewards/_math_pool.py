"""Symbolic comparison in separate processes, which an expression may hang or crash without harm to
the run."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.errors import ModelError

from .._answers.verdict import Comparison, Verdict
from ._worker_pool import BrokenWorker, End, TaskOutcome, WorkerPool

MEMORY_BYTES = 4 << 30

WALL_FACTOR = 30
"""Wall-clock seconds per second of processor time: a worker that has done nothing by then is
stuck."""

_ENDS = {End.CPU: Verdict.TIMEOUT, End.HUNG: Verdict.TIMEOUT, End.DIED: Verdict.CRASHED}
_REPLIES = {"unparsed": Verdict.UNPARSED, "crashed": Verdict.CRASHED}


class MathPool(WorkerPool):
    """Compares expressions with math-verify."""

    def __init__(self, workers: int, cpu_s: float, script: str | Sequence[str] = "_math_worker.py"):
        super().__init__(
            script,
            workers=workers,
            cpu_s=cpu_s,
            quiet_s=WALL_FACTOR * cpu_s,
            memory_bytes=MEMORY_BYTES,
        )

    def compare(self, pairs: Sequence[Comparison]) -> list[Verdict]:
        """A verdict for each pair, in order.

        If an answer breaks its workers repeatedly, that is a verdict on the answer. Raises
        ModelError where math-verify cannot be imported, WorkerError where processes do not start.
        """
        tasks = [{"answer": pair.answer, "expected": pair.expected} for pair in pairs]
        try:
            outcomes = self.run(tasks, again=lambda outcome: outcome.end is End.DIED)
        except BrokenWorker as problem:
            message = f"math-verify cannot be imported: {problem}"
            raise ModelError(message, hint="pip install math-verify", code="F51") from problem
        return [_verdict(outcome) for outcome in outcomes if outcome is not None]


def _verdict(outcome: TaskOutcome) -> Verdict:
    if outcome.end is not None:
        return _ENDS[outcome.end]
    if "equal" in outcome.reply:
        return Verdict.RIGHT if outcome.reply["equal"] else Verdict.WRONG
    return next(verdict for name, verdict in _REPLIES.items() if name in outcome.reply)
