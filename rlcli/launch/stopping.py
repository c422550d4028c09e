"""Being asked to stop: the first signal ends the run after the step under way, a second one ends it now."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from rlcli.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """Context in which each of SIGNALS asks for an orderly stop; `requested` is the first that came."""

    def __init__(self, say: Callable[[str], None]):
        self.requested: signal.Signals | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.requested is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 75 (try again later) after a scheduler's signal."""
        return 130 if self.requested is signal.SIGINT else 75

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            for one in SIGNALS:
                signal.signal(one, signal.SIG_DFL)  # a third one does not even wait for the clearing up
            stopped = Stopped(f"stopped at once by {signal.Signals(number).name}; the step under way is lost")
            stopped.exit_code = 128 + number
            raise stopped
        self.requested = signal.Signals(number)
        name = "Ctrl-C (SIGINT)" if self.requested is signal.SIGINT else self.requested.name
        self._say(f"{name}: stopping after this step and saving; once more stops now")
