"""Which calls of a run overlap: what each waits for over the steps,
and a picture of a few steps in time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from rlcli.api.dataflow import calls_ahead
from rlcli.recipe.graph import runs_after, stages, train_graph
from rlcli.topology.groups import pool_name, pooled_roles

if TYPE_CHECKING:
    from rlcli.recipe.schema import Call, Recipe
    from rlcli.topology.placement import Topology

At = tuple[str, int]
"""A call and its step, counted from 1."""

TURNS = {"generate": 4, "train_step": 2}
"""Number of turns that a call is drawn with; all others take one turn."""
COLUMNS = 28


class Timetable:
    """The calls of a recipe over its steps: each is sent to its ranks once what it waits for is
    done, and a rank handles calls in the order in which they were sent."""

    def __init__(self, recipe: Recipe, topology: Topology):
        self.calls = {name: recipe.graph[name] for stage in stages(recipe.graph) for name in stage}
        self.places = _places(self.calls, recipe, topology)
        """Call → what works on it: ranks, or the pool of its role."""
        self._followers = {
            name: frozenset(topology.placement(call.hooks.copy_to).ranks) - self.places[name]
            for name, call in self.calls.items()
            if call.hooks.copy_to is not None
        }
        """Call → the other ranks to which it copies weights."""
        self._after = runs_after(recipe.graph)
        self._window = topology.open_steps
        self._lag = 1 + recipe.train.max_staleness
        self._writers = _writers(self.calls)
        ahead = calls_ahead(train_graph(recipe)) if recipe.train.max_staleness else []
        self._ahead = [mfc.name for mfc in ahead]
        """Calls that run ahead of the steps; the others form a step."""
        self._in_steps = [name for name in self.calls if name not in self._ahead]
        self._paces = self._writers_of_samplers() or set(self._in_steps)
        """What must be done at a step so that more samples may be generated ahead."""

    def _writers_of_samplers(self) -> set[str]:
        """The calls that change the weights with which samples are generated ahead."""
        calls = [self.calls[name] for name in self._ahead]
        samplers = [call.model for call in calls if call.call == "generate"]
        return set[str]().union(*(self._writers.get(role, ()) for role in samplers))

    def _are_apart(self, first: str, second: str) -> bool:
        """Whether two calls have neither a rank nor a pool in common."""
        return self.places[first].isdisjoint(self.places[second])

    @property
    def is_apart(self) -> bool:
        """Whether some calls have neither a rank nor a pool in common."""
        return any(self._are_apart(*pair) for pair in combinations(self.calls, 2))

    def waits_for(self, call: str, step: int) -> set[At]:
        """What must be done before a call may start, whatever ranks are free."""
        tasks = {(name, step) for name in self._after[call]} | {(call, step - 1)}
        if call in self._ahead:
            tasks |= {(writer, step - self._lag) for writer in self._paces}
            return {task for task in tasks if task[1] > 0}
        section = self.calls[call]
        tasks |= {(name, step) for name in self._ahead}
        tasks |= {(writer, step - 1) for writer in self._writers.get(section.model, ())}
        tasks |= {(writer, step - 1) for of in _written(section) for writer in self._writers[of]}
        # limit on the steps open at a time
        tasks |= {(name, step - self._window) for name in self._in_steps}
        return {task for task in tasks if task[1] > 0}

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
        rows: dict[str, list[int | None]] = {name: [None] * COLUMNS for name in self.calls}
        free = dict.fromkeys(frozenset[int | str]().union(*self.places.values()), 0)
        done, sent, copying = set[At](), set[At](), set[At]()
        running: list[tuple[int, int, At]] = []
        now = 0
        while now < COLUMNS:
            for name, step in self._ready(sent, done):
                begin = max((now, *(free[lane] for lane in self.places[name])))
                end = begin + TURNS.get(self.calls[name].call, 1)
                free |= dict.fromkeys(self.places[name], end)
                rows[name][begin:end] = [step] * len(rows[name][begin:end])
                sent.add((name, step))
                heapq.heappush(running, (end, len(sent), (name, step)))
            now, _, task = heapq.heappop(running)
            copied = max((free[rank] for rank in self._followers.get(task[0], ())), default=now)
            if copied > now and task not in copying:  # followers first finish what they work on
                copying.add(task)
                heapq.heappush(running, (copied, len(sent), task))
            else:
                done.add(task)
        return rows

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


def _places(
    calls: Mapping[str, Call], recipe: Recipe, topology: Topology
) -> dict[str, frozenset[int | str]]:
    """Call → what works on it: ranks, or the pool of its role."""
    pooled = pooled_roles(recipe)
    return {
        name: frozenset[int | str](
            [pool_name(call.model)]
            if call.model in pooled
            else topology.placement(call.model).ranks
        )
        for name, call in calls.items()
    }


def _writers(calls: Mapping[str, Call]) -> dict[str, set[str]]:
    """Role → the calls that change its weights."""
    writers: dict[str, set[str]] = {}
    for name, call in calls.items():
        for role in _written(call):
            writers.setdefault(role, set()).add(name)
    return writers


def _written(call: Call) -> list[str]:
    written = [call.model] if call.call == "train_step" else []
    return [*written, call.hooks.copy_to] if call.hooks.copy_to is not None else written
