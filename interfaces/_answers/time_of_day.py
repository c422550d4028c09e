"""Times of day, such as 3:45 and 3:45 PM. They look like ratios, but 3:45 is not 1:15."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .markup import readable

_TIME = re.compile(
    r"(?P<hour>[01]?[0-9]|2[0-4]):(?P<minute>[0-5][0-9])(?:\s*(?P<half>[ap])\.?\s?m\.?)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class TimeOfDay:
    """A time of day."""

    hour: int
    minute: int
    half: str
    """"a" before noon, "p" after it; "" if that is not said."""

    def is_same(self, gold: TimeOfDay) -> bool:
        """The half of the day matters where both name one."""
        halves = {self.half, gold.half} - {""}
        return (self.hour, self.minute) == (gold.hour, gold.minute) and len(halves) < 2


def read_time(text: str) -> TimeOfDay | None:
    """The time of day that the whole text states, or None."""
    match = _TIME.fullmatch(readable(text))
    if match is None:
        return None
    return TimeOfDay(int(match["hour"]), int(match["minute"]), (match["half"] or "").lower())
