"""A display's knowledge of the run so far: the curves, the speed, the last evaluation."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from rlcli.observe.series import NAMES, find_key, number

WINDOW = 20
"""Number of steps that the speed is averaged over."""

OF_THE_WHOLE = ("time/step", "time/idle_share/")
"""Prefixes of the names of times that are not part of a step."""

RESTARTS = "restarts/"
"""Prefix of the names of counts of processes that were started again in a step."""

EVALUATED = ("accuracy", "reward", "loss")
"""Evaluation results worth a line, best first."""


class Progress:
    """Progress of a run, fed by a display; `steps` is 0 if their number is unknown."""

    def __init__(self, title: str, steps: int, clock: Callable[[], float] = time.monotonic):
        self.title = title
        self.steps = steps
        self.done = 0
        self.last: dict[str, float] = {}
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.restarts: Counter[str] = Counter()
        """Group of servers or pool processes → how many of them were started again."""
        self.curves: dict[str, list[float]] = {name: [] for name in NAMES}
        self._clock = clock
        self._started = clock()
        self._ticks: deque[tuple[float, int]] = deque([(self._started, 0)], maxlen=WINDOW + 1)

    def step(self, record: Mapping[str, Any]) -> None:
        self.last = {key: value for key in record if (value := number(record[key])) is not None}
        is_first = not self.done
        self.done = int(self.last.get("step", self.done + 1))
        if is_first:  # of this process; a resumed run does not begin at step 1
            self._ticks[0] = (self._ticks[0][0], self.done - 1)
        self._ticks.append((self._clock(), self.done))
        for group in (key for key in self.last if key.startswith(RESTARTS)):
            self.restarts[group.removeprefix(RESTARTS)] += int(self.last[group])
        for name, key in _keys_of_curves(tuple(self.last)).items():
            self.curves[name].append(self.last[key])

    def evaluation(self, step: int, record: Mapping[str, Any]) -> dict[str, float]:
        """Take the results of an evaluation and return them, with names without `eval/`."""
        numbers = {key: value for key in record if (value := number(record[key])) is not None}
        results = {key.removeprefix("eval/"): value for key, value in numbers.items()}
        results.pop("step", None)
        self.evaluations.append((step, results))
        if step == 0:  # the time before the first step says nothing about the speed
            self._ticks[0] = (self._clock(), 0)
        return results

    def resume(self) -> None:
        """Continue now: the pace is that of the steps from here on."""
        self._ticks.clear()
        self._ticks.append((self._clock(), self.done))

    def end(self, at: float) -> None:
        """Stop the clock: the run was over at that time."""
        self._clock = lambda: at

    def evaluated(self, name: str) -> list[float]:
        """One result over all evaluations."""
        return [results[name] for _, results in self.evaluations if name in results]

    def telling_curves(self) -> list[tuple[str, list[float]]]:
        """Names and values of the curves to show: reward, KL and length if there are rewards, else
        the loss; staleness if samples are made ahead of training."""
        names = (
            ("reward", "kl", "length")
            if self.curves["reward"]
            else ("loss", "accuracy", "kl", "length")
        )
        names = (*names, "staleness")
        return [(name, self.curves[name]) for name in names if self.curves[name]]

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started

    @property
    def seconds_per_step(self) -> float | None:
        """Wall time per step over the last WINDOW steps, evaluations included."""
        (first, first_step), (last, last_step) = self._ticks[0], self._ticks[-1]
        return (last - first) / (last_step - first_step) if last_step > first_step else None

    @property
    def eta(self) -> float | None:
        """Remaining seconds, counted down while a step runs."""
        pace = self.seconds_per_step
        if pace is None or not self.steps:
            return None
        left = (self.steps - self.done) * pace
        return max(0.0, left - min(pace, self._clock() - self._ticks[-1][0]))

    @property
    def calls(self) -> list[tuple[str, float]]:
        """Calls of the last step with their seconds, the longest first."""
        finite = [(key, value) for key, value in self.last.items() if math.isfinite(value)]
        times = [
            (key[5:], value)
            for key, value in finite
            if key.startswith("time/") and not key.startswith(OF_THE_WHOLE)
        ]
        return sorted(times, key=lambda pair: -pair[1])

    @property
    def tokens_per_second(self) -> float | None:
        return self.last.get("tokens_per_second")


@lru_cache(maxsize=64)
def _keys_of_curves(keys: tuple[str, ...]) -> Mapping[str, str]:
    """Curve → its key among those of a record. Most records of a run have the same keys."""
    return {name: key for name in NAMES if (key := find_key(keys, name)) is not None}
