"""Times of other nodes by the master's clock.

Nodes have clocks that began at different times. A rank cannot have begun a request before the
master sent it, nor ended it after the master has received the answer. So each answer bounds how far
the clock of the rank's node is ahead of the master's; of the last answers, the tightest bounds
count.
This needs no messages of its own. (Cristian, "Probabilistic clock synchronization", 1989.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WINDOW = 256
"""Answers of a node after which older bounds are forgotten, in two halves: clocks drift apart over
hours."""


@dataclass
class ClockBounds:
    """The lowest and the highest number of seconds that a clock may be ahead."""

    low: float = -math.inf
    high: float = math.inf
    answers: int = 0

    def note(self, low: float, high: float) -> None:
        self.low, self.high = max(self.low, low), min(self.high, high)
        self.answers += 1


@dataclass
class NodeClock:
    """The clock of a node, by its last answers."""

    before: ClockBounds = field(default_factory=ClockBounds)
    newest: ClockBounds = field(default_factory=ClockBounds)

    def note(self, low: float, high: float) -> None:
        if self.newest.answers == WINDOW // 2:
            self.before, self.newest = self.newest, ClockBounds()
        self.newest.note(low, high)

    @property
    def ahead(self) -> float:
        return (self._low + self._high) / 2

    @property
    def error(self) -> float:
        """The largest error of `ahead`."""
        return abs(self._high - self._low) / 2

    @property
    def _low(self) -> float:
        return max(self.before.low, self.newest.low)

    @property
    def _high(self) -> float:
        return min(self.before.high, self.newest.high)


class Clocks:
    """The clocks of all nodes. That of node 0 is the master's own."""

    def __init__(self, ranks_per_node: int):
        self._ranks_per_node = ranks_per_node
        self._nodes: dict[int, NodeClock] = {}

    def note(self, rank: int, sent: float, began: float, ended: float, received: float) -> None:
        """An answer: `sent` and `received` by the master's clock, the others by the rank's."""
        if node := rank // self._ranks_per_node:
            self._nodes.setdefault(node, NodeClock()).note(ended - received, began - sent)

    def ahead(self, rank: int) -> float:
        """Seconds that the clock of a rank's node is ahead of the master's."""
        clock = self._nodes.get(rank // self._ranks_per_node)
        return clock.ahead if clock is not None else 0.0

    def described(self) -> dict[str, dict[str, float]]:
        """Node → the seconds that its clock is ahead, and the largest error of that."""
        return {
            f"node {node}": {"ahead": clock.ahead, "error": clock.error}
            for node, clock in sorted(self._nodes.items())
        }
