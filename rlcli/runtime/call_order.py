"""The order in which calls start: it decides which weights they see, and which collectives match up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Pending:
    """A call that has not started yet."""

    role: str
    ranks: tuple[int, ...]
    """Ranks that it keeps busy, which start their calls in order."""
    run: Callable[[], None] = lambda: None
    has_inputs: bool = False


class CallOrder:
    """Starts each call once its inputs are there, and after the calls that were added before it to the same ranks."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []

    def add(self, call: Pending) -> None:
        """The next call of its ranks."""
        self._pending.append(call)

    def give_way(self, call: Pending) -> None:
        """Let later calls of other roles go first."""
        place = self._pending.index(call)
        own = [one for one in self._pending[place:] if one.role == call.role]
        self._pending[place:] = [*(one for one in self._pending[place:] if one not in own), *own]

    def inputs_are_there(self, call: Pending) -> None:
        """Start the call, and those that waited for it, unless an earlier one still waits."""
        call.has_inputs = True
        busy: set[int] = set()
        for one in list(self._pending):
            if one.has_inputs and busy.isdisjoint(one.ranks):
                self._pending.remove(one)
                one.run()
            else:
                busy.update(one.ranks)
