"""Says the time, and so is not reproducible."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rlcli.api.environment import Environment, register_environment


@dataclass(kw_only=True)
class ByTheClock(Environment):
    """A clock."""

    def now(self) -> float:
        """The time, in seconds since 1970."""
        return time.time_ns() / 1e9


register_environment("by_the_clock", ByTheClock)
