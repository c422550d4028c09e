"""Where the time of a step goes: calls, copies of weights, moves of tensors, and ranks that had nothing to do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rlcli.topology import WorkerGroup


class StepTimes:
    """Adds up seconds since the last step ended. A call counts when it is done, also one of a later step."""

    def __init__(self, groups: Sequence[WorkerGroup], clock: Callable[[], float] = time.perf_counter):
        self._groups = {"+".join(group.roles): group.ranks for group in groups}
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """What follows belongs to the next step."""
        self._began = self._clock()
        self._busy: Counter[int] = Counter()
        self._moves = 0.0

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return self._clock() - self._began

    def count_call(self, seconds: Mapping[int, float]) -> None:
        """`seconds` that each of its ranks computed."""
        self._busy.update(seconds)

    def count_move(self, seconds: Iterable[float]) -> None:
        """Of a move of tensors between ranks, `seconds` of each that took part: it took as long as the slowest."""
        self._moves += max(seconds, default=0.0)

    def report(self, seconds: float) -> dict[str, float]:
        """Of a step that took `seconds`: `time/moves`, and for each group of ranks `time/idle/<roles>`, the seconds in
        which they computed nothing, in the mean over them, and `time/idle_share/<roles>`, their share of the step."""
        idle = {
            name: max(0.0, seconds - sum(self._busy[rank] for rank in ranks) / len(ranks))
            for name, ranks in self._groups.items()
        }
        named = {f"time/idle/{name}": of_group for name, of_group in idle.items()}
        named |= {f"time/idle_share/{name}": of_group / seconds for name, of_group in idle.items() if seconds}
        return {"time/step": seconds, **named} | ({"time/moves": self._moves} if self._moves else {})
