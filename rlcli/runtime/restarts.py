"""Processes of servers and pools that have ended and were started again: reported at once, and counted per step."""

from __future__ import annotations

from collections import Counter

from rlcli.observe.display import Display
from rlcli.observe.progress import RESTARTS
from rlcli.runtime.messages import Report
from rlcli.runtime.ranks import Ranks

RESTARTED = "restarted"
"""Name of the report that such a process was started again: its `group` and `name`, the
`machine`, and `how` it had ended."""


class Restarts:
    """The restarts since the last step ended."""

    def __init__(self, ranks: Ranks, display: Display):
        self._display = display
        self._of_step: Counter[str] = Counter()
        """Group → how many of its processes were started again."""
        ranks.listen(RESTARTED, self._take)

    def numbers(self) -> dict[str, float]:
        """`restarts/<group>` of each group that had some, for the metrics of a step. The next step begins."""
        counts = {f"{RESTARTS}{group}": float(count) for group, count in sorted(self._of_step.items())}
        self._of_step.clear()
        return counts

    def _take(self, report: Report) -> None:
        told = report.value
        self._of_step[told["group"]] += 1
        self._display.warning(f"{told['name']} on {told['machine']} {told['how']}; it was started again")
