"""A kitchen scale: tools with which a policy weighs out a recipe from the pantry of its row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Examples, register_environment
from rlcli.api.limits import Limits, check_arguments


@dataclass(kw_only=True)
class Pantry(Environment):
    """Weighs out a recipe. A row has its `pantry`, grams of each ingredient, the `recipe`, grams of
    each ingredient for one person, and the number of `people`.

    The policy moves ingredients from the pantry into a bowl, which is empty at first, and says at
    the end how many grams the bowl weighs. The reward is from 0 to 1: for the bowl, the share of
    the ingredients that are right, and for the weight, stated as the last number of the last turn,
    `weight_share` of the whole. An ingredient of the recipe is right if the bowl has what all
    people need, up to `tolerance`; one that the recipe does not have counts as one more that is
    wrong.
    """

    REPRODUCIBLE: ClassVar[bool] = True
    REWARDS: ClassVar[tuple[float, float]] = (0.0, 1.0)
    EXAMPLES: ClassVar[Examples] = (
        {
            "row": {
                "pantry": {"flour": 1000, "sugar": 500, "salt": 50},
                "recipe": {"flour": 100, "sugar": 20},
                "people": 3,
            },
            "turns": [
                {"list_pantry": {}},
                {"take": {"ingredient": "flour", "grams": 300}},
                {"take": {"ingredient": "sugar", "grams": 60}},
                "The bowl weighs 360 g.",
            ],
            "observed": [
                "flour: 1000 g, sugar: 500 g, salt: 50 g",
                "flour: 300 g in the bowl, 700 g in the pantry",
                "sugar: 60 g in the bowl, 440 g in the pantry",
            ],
            "reward": 1.0,
        },
        {
            "row": {
                "pantry": {"rice": 400, "peas": 100},
                "recipe": {"rice": 80, "peas": 30},
                "people": 2,
            },
            "turns": [
                {"take": {"ingredient": "rice", "grams": 200}},
                {"put_back": {"ingredient": "rice", "grams": 40}},
                {"take": {"ingredient": "peas", "grams": 101}},
                {"take": {"ingredient": "salt", "grams": 1}},
                "160",
            ],
            "observed": [
                "rice: 200 g in the bowl, 200 g in the pantry",
                "rice: 160 g in the bowl, 240 g in the pantry",
                "error: ValueError: the pantry has only 100 g of it",
                "error: ValueError: there is no such ingredient",
            ],
            "reward": 0.6,
        },
    )
    LIMITS: ClassVar[Limits] = {
        "tolerance": {"ge": 0, "lt": 1},
        "weight_share": {"ge": 0, "le": 1},
    }

    tolerance: float = 0.05
    """How far the amount of an ingredient may be from the right one, relative to that."""

    weight_share: float = 0.2
    """Share of the reward that is for the weight of the bowl; the rest is for its content."""

    _pantry: dict[str, int] = field(init=False, repr=False, default_factory=dict)
    """Grams left of each ingredient."""
    _bowl: dict[str, int] = field(init=False, repr=False, default_factory=dict)
    """Grams of each ingredient that was ever taken."""
    _needed: dict[str, int] = field(init=False, repr=False, default_factory=dict)
    """Grams of each ingredient that all people need."""

    def __post_init__(self) -> None:
        check_arguments(self)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        recipe, people = row["recipe"], row["people"]
        if not recipe:
            raise ValueError("the recipe of the row is empty")
        self._pantry, self._bowl = dict(row["pantry"]), {}
        self._needed = {ingredient: grams * people for ingredient, grams in recipe.items()}
        listed = ", ".join(f"{grams} g of {ingredient}" for ingredient, grams in recipe.items())
        return (
            f"Weigh out a meal for {people}. One person needs {listed}. Use list_pantry, take and "
            "put_back; then say how many grams the bowl weighs.\n"
        )

    def list_pantry(self) -> str:
        """List what the pantry has left."""
        return ", ".join(f"{ingredient}: {grams} g" for ingredient, grams in self._pantry.items())

    def take(self, ingredient: str, grams: int) -> str:
        """Move some of an ingredient from the pantry into the bowl.

        Args:
            ingredient: Its name, as list_pantry writes it.
            grams: How much of it, at least 1.
        """
        self._check(ingredient, grams)
        if grams > self._pantry[ingredient]:
            raise ValueError(f"the pantry has only {self._pantry[ingredient]} g of it")
        return self._move(ingredient, grams)

    def put_back(self, ingredient: str, grams: int) -> str:
        """Move some of an ingredient from the bowl back into the pantry.

        Args:
            ingredient: Its name, as list_pantry writes it.
            grams: How much of it, at least 1.
        """
        self._check(ingredient, grams)
        if grams > self._bowl.get(ingredient, 0):
            raise ValueError(f"the bowl has only {self._bowl.get(ingredient, 0)} g of it")
        return self._move(ingredient, -grams)

    def score(self, answer: str) -> float:
        surplus = [name for name, grams in self._bowl.items() if grams and name not in self._needed]
        right = sum(self._is_right(name, grams) for name, grams in self._needed.items())
        content = right / (len(self._needed) + len(surplus))
        numbers = re.findall(r"[0-9]+", answer)
        stated = (numbers[-1].lstrip("0") or "0") if numbers else None
        is_weighed = stated == str(sum(self._bowl.values()))
        return (1 - self.weight_share) * content + self.weight_share * is_weighed

    def _is_right(self, ingredient: str, needed: int) -> bool:
        return abs(self._bowl.get(ingredient, 0) - needed) <= self.tolerance * needed

    def _check(self, ingredient: str, grams: int) -> None:
        if ingredient not in self._pantry:
            raise ValueError("there is no such ingredient")
        if grams < 1:
            raise ValueError("grams must be at least 1")

    def _move(self, ingredient: str, grams: int) -> str:
        """Into the bowl; out of it, if grams are below 0."""
        self._pantry[ingredient] -= grams
        self._bowl[ingredient] = self._bowl.get(ingredient, 0) + grams
        in_bowl, left = self._bowl[ingredient], self._pantry[ingredient]
        return f"{ingredient}: {in_bowl} g in the bowl, {left} g in the pantry"


register_environment("their_pantry", Pantry)
