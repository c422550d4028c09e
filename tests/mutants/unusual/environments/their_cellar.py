"""A text game: carry a key through a dark cellar to a chest before the lamp goes out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Examples, Observation, register_environment
from rlcli.api.limits import Limits, check_arguments

Room = tuple[int, int]
"""Its row, counted from the north, and its column, counted from the west; both begin with 0."""

STEPS = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
START: Room = (0, 0)


@dataclass(kw_only=True)
class Cellar(Environment):
    """A square cellar. A key and a locked chest are in two different rooms, drawn from the seed;
    the policy begins in the room in the north-west, which has neither.

    A turn is one word: `north`, `south`, `east` or `west` walks to the next room, `take` picks up
    the key, and `open` opens the chest, if the policy carries the key. Taking the key earns
    `key_reward`, opening the chest 1, which ends the game. Every turn burns oil, whatever it says;
    the game ends with the last of it. Walking into a wall costs `bump_cost` in addition.
    """

    REPRODUCIBLE: ClassVar[bool] = True
    EXAMPLES: ClassVar[Examples] = (
        {
            "turns": ["south", "take", "east", "east", "open"],
            "observed": [
                "You walk. Room 2/1: a key. You carry nothing. Oil for 11.\n",
                "You take the key. Room 2/1: empty. You carry a key. Oil for 10.\n",
                "You walk. Room 2/2: empty. You carry a key. Oil for 9.\n",
                "You walk. Room 2/3: a chest. You carry a key. Oil for 8.\n",
                "The chest opens.\n",
            ],
            "reward": 1.25,
        },
        {
            "turns": [
                "North",
                "go east",
                "take",
                "east",
                "east",
                "east",
                "south",
                "open",
                "west",
                "west",
                "take",
                "take",
            ],
            "observed": [
                "That is a wall. Room 1/1: empty. You carry nothing. Oil for 11.\n",
                "Nobody understands that. Room 1/1: empty. You carry nothing. Oil for 10.\n",
                "There is nothing to take. Room 1/1: empty. You carry nothing. Oil for 9.\n",
                "You walk. Room 1/2: empty. You carry nothing. Oil for 8.\n",
                "You walk. Room 1/3: empty. You carry nothing. Oil for 7.\n",
                "That is a wall. Room 1/3: empty. You carry nothing. Oil for 6.\n",
                "You walk. Room 2/3: a chest. You carry nothing. Oil for 5.\n",
                "The chest is locked. Room 2/3: a chest. You carry nothing. Oil for 4.\n",
                "You walk. Room 2/2: empty. You carry nothing. Oil for 3.\n",
                "You walk. Room 2/1: a key. You carry nothing. Oil for 2.\n",
                "You take the key. Room 2/1: empty. You carry a key. Oil for 1.\n",
                "There is nothing to take. The lamp goes out.\n",
            ],
            "reward": 0.15,
        },
    )
    LIMITS: ClassVar[Limits] = {
        "width": {"ge": 2, "le": 50},
        "oil": {"ge": 1},
        "key_reward": {"ge": 0},
        "bump_cost": {"ge": 0},
    }

    width: int = 3
    """Number of rooms from west to east, and from north to south."""

    oil: int = 12
    """Number of turns for which the lamp burns."""

    key_reward: float = 0.25
    """Reward for taking the key."""

    bump_cost: float = 0.05
    """Taken off for walking into a wall."""

    _room: Room = field(init=False, repr=False, default=START)
    _key: Room | None = field(init=False, repr=False, default=None)
    """Where the key lies; None once it is taken."""
    _chest: Room = field(init=False, repr=False, default=START)
    _oil_left: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        check_arguments(self)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        rooms = [(line, column) for line in range(self.width) for column in range(self.width)]
        rooms.remove(START)
        self._key, self._chest = random.Random(seed).sample(rooms, 2)
        self._room, self._oil_left = START, self.oil
        return (
            f"You are in a cellar of {self.width} x {self.width} rooms. Find the key, then the "
            "chest. Say north, south, east, west, take or open.\n" + self._view()
        )

    def step(self, action: str) -> Observation:
        self._oil_left -= 1
        text, reward, is_open = self._act(action.strip().lower())
        if is_open:
            return Observation(f"{text}\n", reward=reward, done=True)
        if self._oil_left == 0:
            return Observation(f"{text} The lamp goes out.\n", reward=reward, done=True)
        return Observation(f"{text} {self._view()}", reward=reward)

    def _act(self, command: str) -> tuple[str, float, bool]:
        """What a command leads to: a text, a reward, and whether the chest is open."""
        if command in STEPS:
            return (*self._walk(*STEPS[command]), False)
        if command == "take":
            return (*self._take(), False)
        if command == "open":
            return self._open()
        return "Nobody understands that.", 0.0, False

    def _walk(self, down: int, right: int) -> tuple[str, float]:
        line, column = self._room[0] + down, self._room[1] + right
        if not (0 <= line < self.width and 0 <= column < self.width):
            return "That is a wall.", -self.bump_cost
        self._room = (line, column)
        return "You walk.", 0.0

    def _take(self) -> tuple[str, float]:
        if self._room != self._key:
            return "There is nothing to take.", 0.0
        self._key = None
        return "You take the key.", self.key_reward

    def _open(self) -> tuple[str, float, bool]:
        if self._room != self._chest:
            return "There is nothing to open.", 0.0, False
        if self._key is not None:
            return "The chest is locked.", 0.0, False
        return "The chest opens.", 1.0, True

    def _view(self) -> str:
        """What the policy sees by the light of the lamp."""
        line, column = self._room
        sights = [
            name
            for name, room in (("a key", self._key), ("a chest", self._chest))
            if room == self._room
        ]
        carried = "nothing" if self._key is not None else "a key"
        return (
            f"Room {line + 1}/{column + 1}: {' and '.join(sights) or 'empty'}. You carry "
            f"{carried}. Oil for {self._oil_left}.\n"
        )


register_environment("their_cellar", Cellar)
