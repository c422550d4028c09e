"""Times in which this process itself did not run, such as after Ctrl-Z: no deadline of another process counts them."""

from __future__ import annotations

import time

PAUSE = 5.0
"""Seconds between two clock checks that mean this process was paused, or busy with a slow disk."""


class OwnPauses:
    """Detects pauses of a loop that checks the clock more often than every PAUSE seconds."""

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def since_last_look(self) -> float:
        """Seconds since the last check if that was a pause, else 0."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        return passed if passed >= PAUSE else 0.0
