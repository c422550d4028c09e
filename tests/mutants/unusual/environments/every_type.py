"""A tool with an argument of each type that JSON has, which is checked once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlcli.api.environment import Environment, register_environment


@dataclass(kw_only=True)
class EveryType(Environment):
    """Repeats its arguments."""

    REPRODUCIBLE: ClassVar[bool] = True

    def repeat(
        self,
        text: str,
        number: float,
        count: int = 1,
        choice: Literal["a", "b", 3] = "a",
        either: str | list[int] | None = None,
        anything: Any = None,
        nested: dict[str, list[dict[str, bool]]] | None = None,
    ) -> str:
        """Repeat all arguments.

        Args:
            text: a text
        """
        if len(text) > 1000:
            raise ValueError("the text is too long")
        return repr((text, number, count, choice, either, anything, nested))


register_environment("every_type", EveryType)
