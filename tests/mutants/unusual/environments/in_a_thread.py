"""Thinks in a thread of its own, which ends with the turn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Observation, register_environment


@dataclass(kw_only=True)
class InAThread(Environment):
    """A die, which is cast until it shows what was said."""

    REPRODUCIBLE: ClassVar[bool] = True

    faces: int = 6
    """Faces of the die."""

    _random: random.Random = field(init=False, repr=False, default_factory=random.Random)
    _pool: ThreadPoolExecutor | None = field(init=False, repr=False, default=None)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._random = random.Random(seed)
        self._pool = ThreadPoolExecutor(1)
        return None

    def step(self, action: str) -> Observation:
        cast = self._pool.submit(self._random.randint, 1, self.faces).result()
        return Observation(f"it is {cast}", reward=cast, done=len(action) == 1)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


register_environment("in_a_thread", InAThread)
