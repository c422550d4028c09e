"""Reads texts as Python, whose errors repeat parts of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.environment import Environment, register_environment


@dataclass(kw_only=True)
class Interpreter(Environment):
    """Says what a text is in Python."""

    REPRODUCIBLE: ClassVar[bool] = True

    def read(self, text: str) -> str:
        """Read a text as Python."""
        try:
            return f"it is {ast.dump(ast.parse(text[:1000]))[:1000]}"
        except (SyntaxError, ValueError) as error:
            return f"error: {error} in {text[:20].partition(chr(0))[0]}"


register_environment("interpreter", Interpreter)
