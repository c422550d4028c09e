"""Stop signals: the first one ends the run after the current step,
a second one ends it immediately.

A supervised run (see `supervisor`) may get a signal twice: from whoever sends it to every process
of a job or a terminal, and from its supervisor, which cannot know whether the run got it too. The
supervisor uses a signal number of its own, so that both can be counted;
the larger count is correct.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from rlcli.errors import Stopped
from rlcli.processes import STOP_SIGNALS

REPEATED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for which a second one does not count: the kernel, the shell and the terminal each send
SIGHUP when a terminal closes, and schedulers warn more than once."""

OF_TERMINALS = (signal.SIGHUP, signal.SIGINT)

_SPARE = (signal.SIGVTALRM, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS, signal.SIGTRAP)
"""Signals that nobody sends to a run, for systems without real-time signals."""
_PASSED_ON = {
    number: signal.SIGRTMIN + number if hasattr(signal, "SIGRTMIN") else spare
    for number, spare in zip(STOP_SIGNALS, _SPARE, strict=True)
}
_AS_SENT = {relay: number for number, relay in _PASSED_ON.items()}


def passed_on(number: int) -> int:
    """The signal with which a supervisor passes this one on: a real-time signal,
    where there are any."""
    return _PASSED_ON[signal.Signals(number)]


def as_sent(number: int) -> signal.Signals:
    """The signal that a supervisor has passed on by this one."""
    return _AS_SENT[number]


def heeded() -> list[signal.Signals]:
    """STOP_SIGNALS, without those of a terminal that this process was started to ignore: under
    `nohup` a run outlives its terminal, and in the background of a script a Ctrl-C is not for it.
    """
    return [
        number
        for number in STOP_SIGNALS
        if number not in OF_TERMINALS or signal.getsignal(number) is not signal.SIG_IGN
    ]


class StopSignals:
    """Context in which each of STOP_SIGNALS requests an orderly stop;
    `requested` is the first one received."""

    def __init__(self, say: Callable[[str], None]):
        self.requested: signal.Signals | None = None
        self._say = say
        self._is_ending = False
        """Clean-up has begun; a further signal interrupts it."""
        self._before: dict[int, Any] = {}
        self._arrived: Counter[int] = Counter()
        self._passed_on: Counter[int] = Counter()
        self._heeded: Counter[int] = Counter()
        self._elsewhere: Callable[[], int | None] = _nothing

    def __call__(self) -> bool:
        if self.requested is None and (number := self._elsewhere()) is not None:
            self._request(signal.Signals(number))
        return self.requested is not None

    def also_heed(self, elsewhere: Callable[[], int | None]) -> None:
        """A signal that a process of the run received on another node; it is never a second one."""
        self._elsewhere = elsewhere

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 75 (try again later) after a scheduler's signal."""
        return 130 if self.requested is signal.SIGINT else 75

    def __enter__(self) -> StopSignals:
        for number in heeded():
            self._before[number] = signal.signal(number, self._arrive)
            signal.signal(passed_on(number), self._arrive_passed_on)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
            # it may arrive after the run has ended: nothing to stop
            signal.signal(passed_on(number), signal.SIG_IGN)

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived[number] += 1
        self._heed(number)

    def _arrive_passed_on(self, number: int, frame: FrameType | None) -> None:
        number = as_sent(number)
        self._passed_on[number] += 1
        self._heed(number)

    def _heed(self, number: int) -> None:
        if max(self._arrived[number], self._passed_on[number]) == self._heeded[number]:
            return  # the same signal, by the other route
        self._heeded[number] += 1
        if self.requested is not None and number in REPEATED:
            return
        if self._is_ending:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.requested is not None:
            self._is_ending = True
            stopped = Stopped(
                f"stopped at once by {signal.Signals(number).name}; the step in progress is lost"
            )
            stopped.exit_code = 128 + number
            raise stopped
        self._request(signal.Signals(number))

    def _request(self, number: signal.Signals) -> None:
        self.requested = number
        name = "Ctrl-C (SIGINT)" if self.requested is signal.SIGINT else self.requested.name
        again = "" if number in REPEATED else " Send again to stop immediately."
        self._say(f"{name}: finishing this step, then saving.{again}")


def _nothing() -> None:
    return None
