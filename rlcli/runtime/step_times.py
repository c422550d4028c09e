"""Where the time of a step goes: calls, copies of weights, transfers of tensors, and idle ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rlcli.topology import WorkerGroup


class StepTimes:
    """Adds up seconds since the last step ended. A call counts when it is done, even if it belongs to a later step."""

    def __init__(self, groups: Sequence[WorkerGroup], clock: Callable[[], float] = time.perf_counter):
        self._groups = {"+".join(group.roles): group.ranks for group in groups}
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Start timing the next step."""
        self._began = self._clock()
        self._busy: Counter[int] = Counter()
        self._moves = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return self._clock() - self._began

    def count_call(self, seconds: Mapping[int, float]) -> None:
        """Count a call; `seconds`: computing time of each of its ranks."""
        self._busy.update(seconds)

    def count_move(self, seconds: Iterable[float]) -> None:
        """Count a transfer of tensors between ranks, `seconds` for each participant: it took as long as the slowest."""
        self._moves += max(seconds, default=0.0)

    def report(self, seconds: float) -> dict[str, float]:
        """Times of a step that took `seconds`: `time/moves`, and for each group of ranks `time/idle/<roles>`, the mean
        seconds in which its ranks computed nothing, and `time/idle_share/<roles>`, their share of the step."""
        idle = {
            name: max(0.0, seconds - sum(self._busy[rank] for rank in ranks) / len(ranks))
            for name, ranks in self._groups.items()
        }
        named = {f"time/idle/{name}": of_group for name, of_group in idle.items()}
        named |= {f"time/idle_share/{name}": of_group / seconds for name, of_group in idle.items() if seconds}
        return {"time/step": seconds, **named} | ({"time/moves": self._moves} if self._moves else {})
