"""Which calls of a run overlap: what each waits for over the steps, and a picture of a few steps in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcli.recipe.graph import runs_after, stages

if TYPE_CHECKING:
    from rlcli.recipe.schema import Call, Recipe
    from rlcli.topology.placement import Topology

At = tuple[str, int]
"""A call, and its step from 1."""

TURNS = {"generate": 4, "train_step": 2}
"""How long a call is drawn; any other takes one turn."""
COLUMNS = 28


class Timetable:
    """The calls of a recipe over its steps: each starts once what it waits for is done and its ranks are free."""

    def __init__(self, recipe: Recipe, topology: Topology):
        self.calls = {name: recipe.graph[name] for stage in stages(recipe.graph) for name in stage}
        self.ranks = {name: frozenset(topology.placement(call.model).ranks) for name, call in self.calls.items()}
        self._apart = {
            (a, b) for a, one in self.ranks.items() for b, other in self.ranks.items() if one.isdisjoint(other)
        }
        self._after = runs_after(recipe.graph)
        self._staleness = recipe.train.max_staleness
        self._writers: dict[str, set[str]] = {}
        for name, call in self.calls.items():
            for role in _written(call):
                self._writers.setdefault(role, set()).add(name)

    @property
    def is_apart(self) -> bool:
        """Whether some calls have no rank in common."""
        return bool(self._apart)

    def waits_for(self, call: str, step: int) -> set[At]:
        """What must be done before a call may start, whatever ranks are free."""
        found = {(name, step) for name in self._after[call]} | {(call, step - 1)}
        role, kind = self.calls[call].model, self.calls[call].call
        lag = 1 + (self._staleness if kind == "generate" else 0)
        found |= {(writer, step - lag) for writer in self._writers.get(role, ())}
        found |= {(other, step - 1) for of in _written(self.calls[call]) for other in self._writers[of]}
        found |= {(name, step - self._staleness - 2) for name in self.calls}  # so many steps are open at a time
        return {one for one in found if one[1] > 0}

    def overlaps(self, steps_before: int) -> dict[str, list[str]]:
        """Call → the calls of the same step (0) or of the one before it (1) that it may run at the same time as; of two
        calls of one step, the first has the other."""
        late = self._staleness + 3  # early steps wait for less
        before = {(name, step): self._all_before((name, step)) for name in self.calls for step in (late, late - 1)}
        found: dict[str, list[str]] = {}
        names = list(self.calls)
        for place, name in enumerate(names):
            for other in names if steps_before else names[place + 1 :]:
                one, two = (name, late), (other, late - steps_before)
                if (name, other) in self._apart and two not in before[one] and one not in before[two]:
                    found.setdefault(name, []).append(other)
        return found

    def _all_before(self, task: At) -> set[At]:
        """Of the same step and of the one before it."""
        found, left = set[At](), [task]
        while left:
            more = {one for one in self.waits_for(*left.pop()) if one[1] >= task[1] - 1} - found
            found |= more
            left.extend(more)
        return found

    def turns(self) -> dict[str, list[int | None]]:
        """Call → the step that it works on, turn by turn."""
        rows: dict[str, list[int | None]] = {name: [] for name in self.calls}
        done: set[At] = set()
        running: dict[At, int] = {}
        for turn in range(COLUMNS):
            done |= {task for task, end in running.items() if end <= turn}
            running = {task: end for task, end in running.items() if end > turn}
            for name, step in self._waiting(done | set(running)):
                has_ranks = all((one, name) in self._apart for one, _ in running)
                if has_ranks and self.waits_for(name, step) <= done:
                    running[name, step] = turn + TURNS.get(self.calls[name].call, 1)
            for name, row in rows.items():
                row.append(next((step for one, step in running if one == name), None))
        return rows

    def _waiting(self, started: set[At]) -> Iterator[At]:
        """The calls of the first steps that have not started, oldest step first."""
        steps = range(1, 2 + max((step for _, step in started), default=0))
        yield from ((name, step) for step in steps for name in self.calls if (name, step) not in started)


def _written(call: Call) -> list[str]:
    own = [call.model] if call.call == "train_step" else []
    return [*own, call.hooks.copy_to] if call.hooks.copy_to is not None else own
