"""What may run now. Pure: it is told what has started and finished, and answers which calls are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import networkx

from rlcli.api.dataflow import MFCDef, build_graph


@dataclass(frozen=True, order=True)
class Task:
    """One call at one step (from 0)."""

    step: int
    place: int
    """Of the call in the graph's topological order."""
    call: str = field(compare=False)


class Scheduler:
    """Unrolls a graph over steps.

    A call is ready when its producers of the same step are done and its role's weights are new enough: with
    `max_staleness` η, generation at step k needs the weights trained at step k − 1 − η. A role's training steps
    happen in order. At most η + 1 steps are open at a time.
    """

    def __init__(self, mfcs: Sequence[MFCDef], steps: int, max_staleness: int = 0, first_step: int = 0):
        self._graph = build_graph(mfcs, max_staleness=max_staleness)
        order = list(networkx.lexicographical_topological_sort(self._graph, key=[m.name for m in mfcs].index))
        self._places = {name: place for place, name in enumerate(order)}
        self._mfcs = {mfc.name: mfc for mfc in mfcs}
        self._steps = steps
        self._window = max_staleness + 1
        self._versions = {mfc.model_name: first_step for mfc in mfcs if mfc.is_train}
        self._started: set[Task] = set()
        self._done: dict[int, set[str]] = {}
        self._oldest = first_step

    @property
    def open_steps(self) -> range:
        """Steps whose calls may run: from the oldest unfinished one."""
        return range(self._oldest, min(self._oldest + self._window, self._steps))

    @property
    def finished(self) -> bool:
        return self._oldest >= self._steps

    def ready(self, limit: int | None = None) -> list[Task]:
        """Calls that may start now, oldest step first. None of step `limit` or later."""
        return sorted(
            task
            for step in self.open_steps
            if limit is None or step < limit
            for name, place in self._places.items()
            if (task := Task(step, place, name)) not in self._started and self._may_start(task)
        )

    def start(self, task: Task) -> None:
        self._started.add(task)

    def finish(self, task: Task) -> bool:
        """Count a call as done; returns whether that finished its whole step."""
        done = self._done.setdefault(task.step, set())
        done.add(task.call)
        mfc = self._mfcs[task.call]
        if mfc.is_train:
            self._versions[mfc.model_name] = task.step + 1
        if len(done) < len(self._places):
            return False
        while len(self._done.get(self._oldest, ())) == len(self._places):
            del self._done[self._oldest]
            self._started = {started for started in self._started if started.step != self._oldest}
            self._oldest += 1
        return True

    def _may_start(self, task: Task) -> bool:
        done = self._done.get(task.step, set())
        if not all(producer in done for producer in self._graph.predecessors(task.call)):
            return False
        mfc = self._mfcs[task.call]
        if mfc.is_train and self._versions[mfc.model_name] != task.step:
            return False
        return all(
            self._versions[edge.role] >= edge.required_version(task.step)
            for edge in self._graph.graph["version_edges"]
            if edge.consumer == task.call
        )
