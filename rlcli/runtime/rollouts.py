"""Generates samples ahead of training: sends their calls to the workers and stores what these report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.api.dataflow import MFCDef, ModelInterfaceType
from rlcli.errors import DataError
from rlcli.recipe.graph import train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.admission import Admission, Limits, Ready
from rlcli.runtime.answered import Answered
from rlcli.runtime.calls import Calls
from rlcli.runtime.data_order import StepSizes
from rlcli.runtime.sample_flow import Draw, SampleQueue
from rlcli.runtime.scheduler import Task

GENERATE = ModelInterfaceType.GENERATE


@dataclass(frozen=True)
class Ahead:
    """What was generated ahead of a step that is done."""

    reports: list[Answered]
    """Reports of the calls that made its samples."""
    numbers: Mapping[str, float]
    """Numbers for the metrics."""
    versions: Mapping[str, Mapping[str, int]]
    """Sample → generating call → training steps behind the weights that it sampled with."""
    dropped: Sequence[Mapping[str, Any]]
    """Ledger entries: samples that were dropped and that no checkpoint has accounted for."""


class Rollouts:
    """Makes progress whenever `advance` is called; never blocks."""

    def __init__(self, recipe: Recipe, ahead: Sequence[MFCDef], queue: SampleQueue, calls: Calls, sizes: StepSizes,
                 ready: Iterable[Ready] = ()):  # fmt: skip
        """`ahead`: the calls that run ahead of training."""
        train = recipe.train
        chunk = train.prompts_per_draw or train.prompts_per_step
        limits = Limits(
            train.max_staleness, train.prompts_per_step, chunk, train.max_redraws,
            takes_freshest=train.take_first == "freshest",
        )  # fmt: skip
        self.admission = Admission(queue, ahead, limits, sizes.first_place, ready)
        self.roles = {mfc.model_name for mfc in ahead if mfc.interface_type is GENERATE}
        """Roles whose weights generate samples."""
        self._sizes = sizes
        self._graph = train_graph(recipe)
        self._dataset = train.dataset
        self._ahead = {mfc.name: mfc for mfc in ahead}
        self._calls = calls
        self.failure: DataError | None = None
        """Why nothing more is generated: too many samples were dropped."""
        self._reports: dict[int, dict[str, Answered]] = {}
        """Chunk → its finished calls, by name."""
        self._last_expired = 0
        self._dropped: Counter[str] = Counter()
        """Reason → samples dropped since the last step was done."""

    def advance(self, limit: int) -> None:
        """Draw what may be drawn, and start what may run. `limit`: samples that may be accepted, counted from the first
        step of the run."""
        if self.failure is not None:
            return
        while (drawn := self.admission.admit(limit)) is not None:
            self._load(*drawn)
        while tasks := self.admission.startable():
            for task in tasks:
                self._start(task)

    def _load(self, chunk: int, draws: Sequence[Draw]) -> None:
        rows = [(draw.id, draw.row, draw.attempt) for draw in draws]

        def ended(length: int, missing: list[str]) -> None:
            self._load(chunk, self.admission.redraw(chunk, missing, length))

        self._calls.load(self._graph, self._dataset, rows, lambda: self.admission.loaded(chunk), ended)

    def _start(self, task: Task) -> None:
        ids = self.admission.start(task)
        if ids:
            self._calls.dispatch(task, ids, lambda answered: self._take_in(task, answered))
        else:
            self._calls.forget(self.admission.finish(task, {}))

    def _take_in(self, task: Task, answered: Answered) -> None:
        self._reports.setdefault(task.step, {})[task.call] = answered
        samples = answered.mfc.interface_type is GENERATE and answered.updates
        version = answered.version if samples else None
        try:
            self._calls.forget(self.admission.finish(task, answered.dropped(), version))
        except DataError as error:
            self.failure = error

    # -- for training ----------------------------------------------------------------------------------------

    def has_batch(self, step: int, size: int) -> bool:
        """Whether a step can begin. Samples that have become too stale for it are given back."""
        if not self.admission.has(size):
            return False
        self._calls.forget(self.admission.expire(step))
        return self.admission.has(size)

    def close(self, step: int, ids: Iterable[str], version: int) -> Ahead:
        """A step is done with its samples; `version` is that of the weights that now generate."""
        taken, dropped = self.admission.let_go(ids), self.drain_drops()
        versions = {one.draw.id: one.versions for one in taken}
        return Ahead(self._reports_of(taken), self._numbers(step, taken, version), versions, dropped)

    def drain_drops(self) -> list[dict[str, Any]]:
        """Ledger entries: the samples dropped since the last call of this."""
        dropped = self.admission.drain_drops()
        self._dropped.update(line["reason"] for line in dropped)
        return dropped

    def _reports_of(self, taken: Sequence[Ready]) -> list[Answered]:
        """Reports of the chunks that these samples come from and of earlier ones, if not reported yet: the calls, added
        up."""
        newest = max((one.chunk for one in taken), default=-1)
        merged: dict[str, Answered] = {}
        for chunk in sorted(number for number in self._reports if number <= newest):
            for name, one in self._reports.pop(chunk).items():
                merged[name] = merged[name].and_then(one) if name in merged else one
        return [merged[name] for name in self._ahead if name in merged]

    def _numbers(self, step: int, taken: Sequence[Ready], version: int) -> dict[str, float]:
        """Numbers for the metrics: on the samples that the step took, and the fate of others since the step before."""
        lags = Counter(one.staleness(step) for one in taken)
        admission, reasons, self._dropped = self.admission, self._dropped, Counter()
        expired, self._last_expired = admission.expired - self._last_expired, admission.expired
        counts = {
            "ahead": admission.accepted - self._sizes.place(version), "running": admission.running,
            "ready": len(admission.ready), "expired": expired, "dropped": reasons.total(),
            "retried": sum(one.draw.attempt > 0 for one in taken),
        }  # fmt: skip
        counts |= {f"dropped/{reason}": reasons[reason] for mfc in self._ahead.values() for reason in mfc.drops}
        shares = {str(lag): lags[lag] / len(taken) for lag in range(admission.limits.max_staleness + 1)}
        spread = {"min": min(lags), "max": max(lags)}
        return (
            {f"{self._ahead[call].model_name}/staleness": mean for call, mean in _mean_lags(step, taken).items()}
            | {f"samples/{name}": float(count) for name, count in counts.items()}
            | {f"staleness/{name}": float(value) for name, value in spread.items()}
            | {f"staleness/share_{name}": share for name, share in shares.items()}
            | {f"queue/{name}": float(depth) for name, depth in admission.depths().items()}
        )


def _mean_lags(step: int, taken: Sequence[Ready]) -> dict[str, float]:
    """Call → mean training steps by which its weights lagged those that step number `step` trains."""
    calls = dict.fromkeys(call for one in taken for call in one.versions)
    lags = {call: [step - one.versions[call] for one in taken if call in one.versions] for call in calls}
    return {call: sum(of_call) / len(of_call) for call, of_call in lags.items()}
