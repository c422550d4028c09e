"""Begins with messages, of which there is one set for all episodes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Observation, register_environment

OPENING = [{"role": "system", "content": "Be polite."}, {"role": "user", "content": "Hello."}]


@dataclass(kw_only=True)
class Greeted(Environment):
    """One turn, which should be polite."""

    REPRODUCIBLE: ClassVar[bool] = True

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Mapping[str, Any]]:
        return copy.deepcopy(OPENING)

    def step(self, action: str) -> Observation:
        return Observation(reward="please" in action, done=True)


register_environment("greeted", Greeted)
