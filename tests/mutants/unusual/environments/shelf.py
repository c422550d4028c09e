"""Tools that change a state, with lists and mappings as arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rlcli.api.environment import Environment, Examples, register_environment


@dataclass(kw_only=True)
class Shelf(Environment):
    """Things on a shelf, which is scored by what is on it."""

    REPRODUCIBLE: ClassVar[bool] = True
    REWARDS: ClassVar[tuple[float, float]] = (0.0, 1.0)
    EXAMPLES: ClassVar[Examples] = (
        {
            "row": {"wanted": ["a cup"]},
            "turns": [
                {"put": {"names": ["a cup"]}, "look": {}},
                {"take": {"name": "a cup"}},
                "done",
            ],
        },
        {"row": {"wanted": ["a cup"]}, "turns": [{"put": {"names": ["a cup"]}}, "done"]},
    )

    _things: list[str] = field(init=False, repr=False, default_factory=list)
    _wanted: list[str] = field(init=False, repr=False, default_factory=list)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._wanted = sorted(row["wanted"])
        self._things = []
        return None

    def put(self, names: list[str], order: Literal["first", "last"] = "last") -> int:
        """Put things on the shelf."""
        self._things = names + self._things if order == "first" else self._things + names
        return len(self._things)

    def take(self, name: str, count: int | None = None) -> list[str]:
        """Take a thing off the shelf."""
        for _ in range(min(count or 1, 9)):
            if name not in self._things:
                raise ValueError(f"there is no {name!r} on the shelf")
            self._things.remove(name)
        return self._things

    def label(self, labels: dict[str, int | str], is_bold: bool = False) -> dict[str, Any]:
        """Label things."""
        return {**labels, "bold": is_bold}

    def look(self) -> str:
        """Look at the shelf."""
        return ", ".join(self._things) or "nothing"

    def score(self, answer: str) -> float:
        return float(sorted(self._things) == self._wanted)


register_environment("shelf", Shelf)
