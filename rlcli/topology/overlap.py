"""Which calls of a run overlap: what each waits for over the steps,
and a picture of a few steps in time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from rlcli.api.dataflow import ModelInterfaceType, calls_ahead, weight_writers
from rlcli.recipe.graph import runs_after, stages, train_graph
from rlcli.topology.groups import pool_name, pooled_roles

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe
    from rlcli.topology.placement import Topology

At = tuple[str, int]
"""A call and its step, counted from 1."""
Lane = int | str
"""A rank, or the name of a pool."""

GENERATE = ModelInterfaceType.GENERATE
TURNS = {"generate": 4, "train_step": 2}
"""Number of turns that a call is drawn with; all others take one turn."""
COLUMNS = 28


class Timetable:
    """The calls of a recipe over its steps: each is sent to its ranks once what it waits for is
    done, and a rank handles calls in the order in which they were sent."""

    def __init__(self, recipe: Recipe, topology: Topology):
        graph = train_graph(recipe)
        calls = {mfc.name: mfc for mfc in graph}
        self.calls = {name: calls[name] for stage in stages(recipe.graph) for name in stage}
        pooled = pooled_roles(recipe)
        self.places = {mfc.name: _lanes(mfc.model_name, pooled, topology) for mfc in graph}
        """Call → what works on it: ranks, or the pool of its role."""
        self._topology = topology
        self._after = runs_after(recipe.graph)
        self._lag = 1 + recipe.train.max_staleness
        self._writers = weight_writers(graph)
        ahead = calls_ahead(graph) if recipe.train.max_staleness else []
        self._ahead = [mfc.name for mfc in ahead]
        """Calls that run ahead of the steps; the others form a step."""
        self._in_steps = [name for name in self.calls if name not in self._ahead]
        samplers = [mfc.model_name for mfc in ahead if mfc.interface_type is GENERATE]
        self._paces = self._writers_of(samplers) or set(self._in_steps)
        """What must be done at a step so that more samples may be generated ahead."""

    def _writers_of(self, roles: Iterable[str]) -> set[str]:
        """The calls that change the weights of any of these roles."""
        return {name for role in roles for name in self._writers.get(role, ())}

    def followers(self, call: str) -> frozenset[Lane]:
        """The other ranks to which a call copies weights."""
        copy = self.calls[call].weight_copy
        ranks = self._topology.placement(copy.target).ranks if copy is not None else ()
        return frozenset(ranks) - self.places[call]

    def _are_apart(self, first: str, second: str) -> bool:
        """Whether two calls have neither a rank nor a pool in common."""
        return self.places[first].isdisjoint(self.places[second])

    def waits_for(self, call: str, step: int) -> set[At]:
        """What must be done before a call may start, whatever ranks are free."""
        waits: list[tuple[Iterable[str], int]] = [(self._after[call], step), ([call], step - 1)]
        if call in self._ahead:
            waits.append((self._paces, step - self._lag))
        else:
            mfc = self.calls[call]
            writers = self._writers_of([mfc.model_name, *mfc.written_roles])
            waits += [(self._ahead, step), (writers, step - 1)]
            # limit on the steps open at a time
            waits.append((self._in_steps, step - self._topology.open_steps))
        return {(name, number) for names, number in waits if number > 0 for name in names}

    def overlaps(self, steps_before: int) -> dict[str, list[str]]:
        """Call → the calls of the same step (0) or of the one before it (1) that may run at the
        same time; a pair within one step is listed under its first call."""
        late = self._lag + 2  # early steps wait for less
        before = {
            (name, step): self._all_before((name, step))
            for name in self.calls
            for step in (late, late - 1)
        }
        overlapping: dict[str, list[str]] = {}
        names = list(self.calls)
        for position, name in enumerate(names):
            for other_name in names if steps_before else names[position + 1 :]:
                task, other_task = (name, late), (other_name, late - steps_before)
                is_ordered = other_task in before[task] or task in before[other_task]
                if self._are_apart(name, other_name) and not is_ordered:
                    overlapping.setdefault(name, []).append(other_name)
        return overlapping

    def _all_before(self, task: At) -> set[At]:
        """Everything it waits for, directly or not, in the same step and the one before it."""
        before, left = set[At](), [task]
        while left:
            waits_for = self.waits_for(*left.pop())
            new = {earlier for earlier in waits_for if earlier[1] >= task[1] - 1} - before
            before |= new
            left.extend(new)
        return before

    def turns(self) -> dict[str, list[int | None]]:
        """Call → the step that it works on, turn by turn."""
        simulation = _Simulation(self)
        while simulation.now < COLUMNS:
            for task in self._ready(simulation.sent, simulation.done):
                simulation.send(task)
            simulation.finish_next()
        return simulation.rows

    def _ready(self, sent: set[At], done: set[At]) -> Iterator[At]:
        """The calls that can be sent now: those of the steps, oldest first,
        then those that run ahead."""
        steps = range(1, 2 + max((step for _, step in sent), default=0))
        in_order = [
            (name, step)
            for names in (self._in_steps, self._ahead)
            for step in steps
            for name in names
        ]
        yield from (task for task in in_order if task not in sent and self.waits_for(*task) <= done)


class _Simulation:
    """Calls at work, turn by turn."""

    def __init__(self, table: Timetable):
        self._table = table
        self.rows: dict[str, list[int | None]] = {name: [None] * COLUMNS for name in table.calls}
        """Call → the step that it works on at each turn."""
        self.now = 0
        self.sent = set[At]()
        self.done = set[At]()
        self._copying = set[At]()
        self._free = defaultdict[Lane, int](int)
        """Lane → the turn at which it will have done what was sent to it."""
        self._ends: list[tuple[int, int, At]] = []
        """(turn, order, call): a heap of what will end."""

    def send(self, task: At) -> None:
        """Send a call to its lanes, which begin it together."""
        name, step = task
        lanes = self._table.places[name]
        begin = max([self.now, *(self._free[lane] for lane in lanes)])
        end = begin + TURNS.get(self._table.calls[name].interface_type.value, 1)
        self._free.update(dict.fromkeys(lanes, end))
        for turn in range(begin, min(end, COLUMNS)):
            self.rows[name][turn] = step
        self.sent.add(task)
        self._expect(task, end)

    def finish_next(self) -> None:
        """Continue to the end of the next call, or to that of its copy of weights."""
        self.now, _, task = heapq.heappop(self._ends)
        followers = self._table.followers(task[0])
        copied = max((self._free[rank] for rank in followers), default=self.now)
        if copied > self.now and task not in self._copying:
            # followers first finish what they work on
            self._copying.add(task)
            self._expect(task, copied)
        else:
            self.done.add(task)

    def _expect(self, task: At, end: int) -> None:
        heapq.heappush(self._ends, (end, len(self.sent), task))


def _lanes(role: str, pooled: Collection[str], topology: Topology) -> frozenset[Lane]:
    """What works on the calls of a role: its ranks, or its pool."""
    return frozenset([pool_name(role)] if role in pooled else topology.placement(role).ranks)
