"""Work in progress as a line: what it is, how far it is, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcli.api.headway import BYTES, SECONDS, Count
from rlcli.observe.series import clock_time
from rlcli.units import size

if TYPE_CHECKING:
    from rich.text import Text

BAR = 16
"""Columns of a bar."""
SHORTEST_LABEL = 12
WORTH_SAYING = 2.0
"""Seconds after which the time that something has taken is said."""


@dataclass(frozen=True)
class Counted:
    """A count, and since when its pace is taken."""

    of: str
    count: Count
    at: float
    """When it was last counted."""
    since: float
    done_before: int
    """How much was done then."""

    @property
    def seconds_each(self) -> float | None:
        done = self.count.done - self.done_before
        return (self.at - self.since) / done if done > 0 else None


class Activity:
    """Implements `rlcli.api.headway.Listener`; whoever draws it asks for a line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.text = ""
        self._clock = clock
        self._began = self._counting_since = clock()
        self._counted: Counted | None = None
        self._usual = 0
        """Seconds that the phase usually takes; 0 if that is unknown."""

    def phase(self, text: str) -> None:
        self.text = " ".join(text.split())
        self._began = self._counting_since = self._clock()
        self._counted = None
        self._usual = 0

    def count(self, count: Count, of: str = "") -> None:
        now, last, of = self._clock(), self._counted, of or self.text
        if count.unit == SECONDS:
            self._usual = count.total
        elif count.done >= count.total:
            self._counted, self._counting_since = None, now
        elif last is not None and last.of == of and last.count.done <= count.done:
            self._counted = replace(last, count=count, at=now)
        elif last is None and of == self.text:
            self._counted = Counted(of, count, now, self._counting_since, 0)
        else:
            self._counted = Counted(of, count, now, now, count.done)

    @property
    def eta(self) -> float | None:
        """Remaining seconds of what is counted, counted down between two counts, or of a phase
        that usually takes so long."""
        if self._counted is None:
            elapsed = self._clock() - self._began
            return self._usual - elapsed if elapsed < self._usual else None
        pace, count = self._counted.seconds_each, self._counted.count
        if pace is None:
            return None
        left = (count.total - count.done) * pace
        return max(0.0, left - (self._clock() - self._counted.at))

    def sentence(self) -> str:
        """`loading the models: 1.2 GiB of 4.8 GiB, eta 0:12`; empty if there is nothing to say."""
        label, facts = self._described()
        return f"{label}: {', '.join(facts)}" if facts else label

    def line(self, width: int, unicode: bool) -> Text:
        """The same in at most `width` columns, with a bar if it is counted; the label is cut
        first."""
        from rich.text import Text

        from rlcli.observe.terminal import bar, cut

        label, facts = self._described()
        tail = "".join(f"  {fact}" for fact in facts)
        room = width - len(tail)
        line = Text(no_wrap=True)
        done, total = self._share()
        line.append(cut(label, max(SHORTEST_LABEL, room - (BAR + 2 if total else 0)), unicode))
        if total:
            columns = min(BAR, room - line.cell_len - 2)
            line.append("  ").append_text(bar(done, total, columns, unicode))
        line.append(tail)
        line.truncate(width)
        return line

    def _described(self) -> tuple[str, list[str]]:
        """What is done, and how far it is."""
        left = [f"eta {clock_time(self.eta)}"] if self.eta is not None else []
        if self._counted is not None:
            return self._counted.of, [_amount(self._counted.count), *left]
        seconds = self._clock() - self._began
        if self.text and seconds >= WORTH_SAYING and not left:
            return self.text, [f"{clock_time(seconds)} so far"]
        return self.text, left

    def _share(self) -> tuple[int, int]:
        """How much is done, and the whole, which is 0 if that is unknown."""
        if self._counted is not None:
            return self._counted.count.done, self._counted.count.total
        elapsed = self._clock() - self._began
        return (int(elapsed), self._usual) if elapsed < self._usual else (0, 0)


def _amount(count: Count) -> str:
    if count.unit == BYTES:
        return f"{size(count.done)} of {size(count.total)}"
    return f"{count.done}/{count.total} {count.unit}"
