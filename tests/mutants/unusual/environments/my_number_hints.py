"""A game: find a hidden number; each guess is answered with its direction, and "closer" or not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Examples, Observation, register_environment
from rlcli.api.limits import Limits, check_arguments


@dataclass(kw_only=True)
class MyNumberHints(Environment):
    """Hides a number from 1 to `highest`. Finding it with the first guess earns 1, with each later
    one `cost` less, but never below 0. A turn that is no such number counts as a guess."""

    REPRODUCIBLE: ClassVar[bool] = True
    REWARDS: ClassVar[tuple[float, float]] = (0.0, 1.0)
    LIMITS: ClassVar[Limits] = {
        "highest": {"ge": 2},
        "guesses": {"ge": 1},
        "cost": {"ge": 0, "le": 1},
    }
    EXAMPLES: ClassVar[Examples] = (
        {"turns": ["4", "2", "6", "1", "3", "5", "7"]},
        {"turns": ["7", " 6 ", "5", "4", "3", "2", "1"]},
        {"turns": ["seven", "0", "8", "1 2 3 4 5 6 7", "-1", "", "4.5"]},
    )

    highest: int = 7
    """The largest number that may be hidden."""

    guesses: int = 7
    """The number of guesses after which the game is over."""

    cost: float = 0.1
    """What each guess after the first costs."""

    _hidden: int = field(init=False, repr=False, default=0)
    _made: int = field(init=False, repr=False, default=0)
    _last: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        check_arguments(self)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._hidden = random.Random(seed).randint(1, self.highest)
        self._made, self._last = 0, None
        return f"Find my number from 1 to {self.highest} in {self.guesses} guesses.\n"

    def step(self, action: str) -> Observation:
        self._made += 1
        guess = action.strip()
        number = int(guess) if guess.isascii() and guess.isdecimal() and len(guess) < 10 else 0
        if number == self._hidden:
            return Observation("found\n", max(0.0, 1 - self.cost * (self._made - 1)), done=True)
        if self._made >= self.guesses:
            return Observation(f"game over; it was {self._hidden}\n", done=True)
        if not 1 <= number <= self.highest:
            return Observation(f"not a number from 1 to {self.highest}\n")
        hint, self._last = self._hint(number), number
        return Observation(f"{hint}\n")

    def _hint(self, number: int) -> str:
        """The direction of the hidden number, and how the guess compares with the one before."""
        direction = "higher" if self._hidden > number else "lower"
        if self._last is None:
            return direction
        gain = abs(self._last - self._hidden) - abs(number - self._hidden)
        return f"{direction}, {'closer' if gain > 0 else 'farther' if gain < 0 else 'as far'}"


register_environment("my_number_hints", MyNumberHints)
