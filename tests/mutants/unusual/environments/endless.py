"""A bandit without an end, whose rewards are noisy and negative."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Observation, register_environment


@dataclass(kw_only=True)
class Endless(Environment):
    """Arms with different costs."""

    REPRODUCIBLE: ClassVar[bool] = True
    ENDS: ClassVar[bool] = False

    arms: int = 3
    """Number of arms."""

    _random: random.Random = field(init=False, repr=False, default_factory=random.Random)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._random = random.Random(seed)
        return f"Choose one of {self.arms} arms."

    def step(self, action: str) -> Observation:
        arm = len(action) % self.arms
        return Observation(f"arm {arm}", reward=-arm - self._random.random())


register_environment("endless", Endless)
