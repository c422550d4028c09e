"""An auction with sealed bids: win what is worth more than it costs, on a budget."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Examples, Observation, register_environment
from rlcli.api.limits import Limits, check_arguments

WORTH = (10, 60)
"""Lowest and highest worth of a lot to the policy."""
HIGHEST_BID = 40
"""Of a rival; the lowest is 1."""
UNIT = 100
"""Money that is a reward of 1."""


@dataclass(kw_only=True)
class Auction(Environment):
    """Sells `lots` lots, one in each turn. The policy reads what a lot is worth to it and bids a
    whole number of coins, 0 for none; what the rivals bid is drawn from the seed and stays hidden.

    The highest bid wins; a rival wins a tie. A winner pays the highest bid of the others, or
    `reserve`, if that is more; a bid below `reserve` never wins. The reward of a lot that the
    policy wins is its worth less its price, in hundreds of coins. A turn that is not a bid, or one
    above what is left of the `budget`, costs `fault_cost`, and a rival gets the lot.
    """

    REPRODUCIBLE: ClassVar[bool] = True
    EXAMPLES: ClassVar[Examples] = (
        {
            "turns": ["10", "20", "58", "49"],
            "observed": [
                "Sold to another. Lot 2 is worth 26 to you. You have 80 coins.\n",
                "Sold to another. Lot 3 is worth 58 to you. You have 80 coins.\n",
                "You pay 31. Lot 4 is worth 51 to you. You have 49 coins.\n",
                "You pay 25. The auction is over.\n",
            ],
            "reward": 0.53,
        },
        {
            "turns": ["ten", "81", "31", " 60 "],
            "observed": [
                "That is not a bid you can make. Lot 2 is worth 26 to you. You have 80 coins.\n",
                "That is not a bid you can make. Lot 3 is worth 58 to you. You have 80 coins.\n",
                "Sold to another. Lot 4 is worth 51 to you. You have 80 coins.\n",
                "You pay 25. The auction is over.\n",
            ],
            "reward": 0.16,
        },
    )
    LIMITS: ClassVar[Limits] = {
        "lots": {"ge": 1, "le": 1000},
        "budget": {"ge": 1, "le": 1_000_000},
        "rivals": {"ge": 1, "le": 100},
        "reserve": {"ge": 0},
        "fault_cost": {"ge": 0},
    }

    lots: int = 4
    """Number of lots."""

    budget: int = 80
    """Coins that the policy has for all lots."""

    rivals: int = 2
    """Number of rivals that bid for each lot."""

    reserve: int = 5
    """Lowest price of a lot."""

    fault_cost: float = 0.05
    """Taken off for a turn that is not a bid the policy can pay."""

    _sale: list[tuple[int, int]] = field(init=False, repr=False, default_factory=list)
    """For each lot its worth to the policy, and the highest bid of the rivals."""
    _lot: int = field(init=False, repr=False, default=0)
    """Number of the lot that is sold now, from 0."""
    _coins: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        check_arguments(self)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        rng = random.Random(seed)
        self._sale = [
            (rng.randint(*WORTH), max(rng.randint(1, HIGHEST_BID) for _ in range(self.rivals)))
            for _ in range(self.lots)
        ]
        self._lot, self._coins = 0, self.budget
        return (
            f"An auction of {self.lots} lots against {self.rivals} rivals; no lot is sold for less "
            f"than {self.reserve}. Bid a whole number.\n" + self._offer()
        )

    def step(self, action: str) -> Observation:
        worth, highest = self._sale[self._lot]
        bid = _bid(action)
        if bid is None or bid > self._coins:
            text, reward = "That is not a bid you can make.", -self.fault_cost
        elif bid > highest and bid >= self.reserve:
            price = max(highest, self.reserve)
            self._coins -= price
            text, reward = f"You pay {price}.", (worth - price) / UNIT
        else:
            text, reward = "Sold to another.", 0.0
        self._lot += 1
        if self._lot == self.lots:
            return Observation(f"{text} The auction is over.\n", reward=reward, done=True)
        return Observation(f"{text} {self._offer()}", reward=reward)

    def _offer(self) -> str:
        """The lot that is sold now."""
        worth, _ = self._sale[self._lot]
        return f"Lot {self._lot + 1} is worth {worth} to you. You have {self._coins} coins.\n"


def _bid(action: str) -> int | None:
    """The number that a turn bids."""
    text = action.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


register_environment("their_auction", Auction)
