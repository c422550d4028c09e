"""Decides what may run now. Pure: given which calls have started and finished, it returns those that are ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlcli.api.dataflow import CallGraph, MFCDef, weight_writers


@dataclass(frozen=True, order=True)
class Task:
    """One call at one step (from 0)."""

    step: int
    place: int
    """Position of the call in the graph's topological order."""
    call: str = field(compare=False)


class Scheduler:
    """Unrolls a graph over steps.

    A call is ready when its producers of the same step are done and its role has the weights that the previous step
    trained, or copied from a role that it trained. A role's weights change in the order of steps. At most `window`
    steps are open at a time: with more than one, a step may begin on devices that are done with the step before.

    With `drops`, calls may drop samples: calls that train or change weights in another way, and all calls that wait for
    them, work on the whole batch and wait until the step is `closed`. The other calls may have to be repeated first.
    """

    def __init__(
        self,
        mfcs: Sequence[MFCDef],
        steps: int,
        first_step: int = 0,
        window: int = 1,
        drops: bool = False,
    ):
        graph = CallGraph(mfcs)
        self._reads = graph.reads
        self._after = {mfc.name: graph.after(mfc.name) for mfc in mfcs}
        self._places = {name: place for place, name in enumerate(graph.order())}
        self._mfcs = {mfc.name: mfc for mfc in mfcs}
        self.steps = steps
        """Total number of steps. May grow."""
        self._window = window
        self._writers = weight_writers(mfcs)
        self._versions = dict.fromkeys(self._writers, first_step)
        self._started: set[Task] = set()
        self._done: dict[int, set[str]] = {}
        self._oldest = first_step
        writers = {mfc.name for mfc in mfcs if mfc.written_roles}
        late = writers.union(*(self._after[name] for name in writers))
        self._early = set(self._places) - late if drops else set[str]()
        """The calls that choose a batch."""
        self._closed: set[int] = set()
        """Open steps whose batch is complete."""

    @property
    def open_steps(self) -> range:
        """Steps whose calls may run: from the oldest unfinished one."""
        return range(self._oldest, min(self._oldest + self._window, self.steps))

    @property
    def finished(self) -> bool:
        return self._oldest >= self.steps

    def ready(self) -> list[Task]:
        """Calls that may start now, oldest step first."""
        return sorted(
            task
            for step in self.open_steps
            for name, place in self._places.items()
            if (task := Task(step, place, name)) not in self._started and self._may_start(task)
        )

    def version(self, roles: Iterable[str]) -> int:
        """Training steps behind the weights of these roles: the fewest if they differ, or the number of finished steps
        if none of them changes."""
        return min((self._versions[role] for role in roles if role in self._versions), default=self._oldest)

    def start(self, task: Task) -> None:
        self._started.add(task)

    def finish(self, task: Task) -> None:
        """Count a call as done."""
        done = self._done.setdefault(task.step, set())
        done.add(task.call)
        for role in self._mfcs[task.call].written_roles:
            if done.issuperset(self._writers[role]):
                self._versions[role] = task.step + 1
        self._advance()

    def chooses(self, step: int) -> bool:
        """Whether all calls that choose the batch of a step are done and the step is not closed yet."""
        is_open = bool(self._early) and step >= self._oldest and step not in self._closed
        return is_open and self._early <= self._done.get(step, set())

    def repeat(self, step: int) -> None:
        """Repeat the calls that choose the batch, on other samples."""
        self._done[step] -= self._early
        self._started = {task for task in self._started if task.step != step or task.call not in self._early}

    def close(self, step: int) -> None:
        """Record that the batch of a step is complete."""
        self._closed.add(step)
        self._advance()

    def is_over(self, step: int) -> bool:
        return step < self._oldest

    def _advance(self) -> None:
        while self._is_done(self._oldest):
            del self._done[self._oldest]
            self._closed.discard(self._oldest)
            self._started = {started for started in self._started if started.step != self._oldest}
            self._oldest += 1

    def _is_done(self, step: int) -> bool:
        return len(self._done.get(step, ())) == len(self._places) and (not self._early or step in self._closed)

    def _may_start(self, task: Task) -> bool:
        done = self._done.get(task.step, set())
        if not done.issuperset(self._reads[task.call]):
            return False
        if self._early and task.call not in self._early and task.step not in self._closed:
            return False
        if not all(self._may_write(task, role) for role in self._mfcs[task.call].written_roles):
            return False
        return self._versions.get(self._mfcs[task.call].model_name, task.step) >= task.step

    def _may_write(self, task: Task, role: str) -> bool:
        """Weights change in the order of steps, after the role's other calls of the step, which need the old ones."""
        writers = {*self._writers[role], *self._after[task.call]}
        others = {name for name, mfc in self._mfcs.items() if mfc.model_name == role} - writers
        started = {other.call for other in self._started if other.step == task.step}
        return self._versions[role] == task.step and others <= started
