"""How long a run took to set up, phase by phase, so that the next start knows what is left: loading
libraries, or starting servers, cannot be counted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rlcli.api.headway import SECONDS, Count, Listener
from rlcli.files import known_object
from rlcli.observe.series import number

FILE = "setup.json"
"""File of a run: phase → seconds."""


class SetupTimes:
    """Implements `rlcli.api.headway.Listener`: measures phases, and passes on what it hears, with
    the time that each has usually taken."""

    def __init__(
        self,
        listener: Listener,
        usual: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.seconds: dict[str, float] = {}
        self._listener, self._usual, self._clock = listener, usual, clock
        self._phase, self._since = "", clock()

    def phase(self, text: str) -> None:
        now = self._clock()
        if self._phase:
            self.seconds[self._phase] = now - self._since
        self._phase, self._since = text, now
        self._listener.phase(text)
        if seconds := round(self._usual.get(text, 0.0)):
            self._listener.count(Count(0, seconds, SECONDS))

    def count(self, count: Count, of: str = "") -> None:
        self._listener.count(count, of)

    def end(self) -> str:
        """End the last phase. Returns the content of FILE."""
        self.phase("")
        seconds = {phase: round(seconds, 1) for phase, seconds in self.seconds.items()}
        return json.dumps(seconds, indent=2) + "\n"


def usual_times(run: Path) -> dict[str, float]:
    """How long the phases took when the run, or else the newest other one of its recipe, was set
    up."""
    others = sorted(run.parent.glob(f"*/{FILE}"), key=lambda file: file.parent.name)
    file = next((file for file in (run / FILE, *reversed(others)) if file.is_file()), run / FILE)
    times = {phase: number(seconds) for phase, seconds in known_object(file).items()}
    return {phase: seconds for phase, seconds in times.items() if seconds is not None}
