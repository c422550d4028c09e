"""A pocket calculator: a tool for sums that are too long to work out in one's head."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.environment import Environment, Examples, register_environment


@dataclass(kw_only=True)
class Calculator(Environment):
    """Works out sums. It does not score: a call of the graph compares the answer."""

    REPRODUCIBLE: ClassVar[bool] = True
    EXAMPLES: ClassVar[Examples] = (
        {"turns": [{"calculate": {"expression": "12+7-3"}}, "16"], "observed": ["16"]},
        {"turns": [{"calculate": {"expression": "-2-0040"}}, "-42"], "observed": ["-42"]},
        {
            "turns": [{"calculate": {"expression": "12+7*3"}}, "33"],
            "observed": ["error: ValueError: only sums of whole numbers, such as 12+7-3"],
        },
    )

    def calculate(self, expression: str) -> str:
        """Work out a sum of whole numbers, such as 12+7-3."""
        if not re.fullmatch(r"[+-]?[0-9]{1,9}([+-][0-9]{1,9}){0,99}", expression):
            raise ValueError("only sums of whole numbers, such as 12+7-3")
        return str(sum(map(int, re.findall(r"[+-]?[0-9]+", expression))))


register_environment("calculator", Calculator)
