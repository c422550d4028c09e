"""A game: find a hidden number in a few guesses, each answered by "higher" or "lower"."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Examples, Observation, register_environment
from rlcli.api.limits import Limits, check_arguments


@dataclass(kw_only=True)
class Guess(Environment):
    """Hides a number from 1 to `highest`. The reward is 1 if it is found; a turn that is not a
    number costs 0.1."""

    REPRODUCIBLE: ClassVar[bool] = True
    EXAMPLES: ClassVar[Examples] = (
        {
            "turns": ["4", "six", "1", " 2 ", "2"],
            "observed": ["lower\n", "not a number\n", "higher\n", "found\n"],
            "reward": 0.9,
        },
        {"turns": ["7", "6", "5", "4", "3", "2", "1"]},
    )
    LIMITS: ClassVar[Limits] = {"highest": {"ge": 1}}

    highest: int = 7
    """The largest number that may be hidden."""

    _hidden: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        check_arguments(self)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._hidden = random.Random(seed).randint(1, self.highest)
        return f"What is my number from 1 to {self.highest}?\n"

    def step(self, action: str) -> Observation:
        guess = action.strip()
        if not guess.isascii() or not guess.isdecimal() or len(guess) > 9:
            return Observation("not a number\n", reward=-0.1)
        if int(guess) == self._hidden:
            return Observation("found\n", reward=1.0, done=True)
        return Observation("higher\n" if self._hidden > int(guess) else "lower\n")


register_environment("guess", Guess)
