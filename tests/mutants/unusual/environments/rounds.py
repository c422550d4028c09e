"""A game that ends or does not, as its argument says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Observation, register_environment


@dataclass(kw_only=True)
class Rounds(Environment):
    """Counts turns."""

    REPRODUCIBLE: ClassVar[bool] = True
    ENDS: ClassVar[bool | None] = None

    last: int = 0
    """The turn that ends the game; 0: none."""

    _turn: int = field(init=False, repr=False, default=0)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._turn = 0
        return "Say something."

    def step(self, action: str) -> Observation:
        self._turn += 1
        return Observation(f"turn {self._turn}", done=self._turn == self.last)


register_environment("rounds", Rounds)
