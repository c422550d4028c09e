"""Rule-based reward: does the response end with the right quantity, whatever its unit?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.interface import register_interface
from rlcli.api.limits import Limits
from rlcli.errors import DataError

from .rewards._text_reward import TextReward

Quantity = tuple[float, str]
"""A number, and its unit; an empty one for a number alone."""

UNITS = {
    "mm": (0.001, "length"),
    "cm": (0.01, "length"),
    "m": (1.0, "length"),
    "km": (1000.0, "length"),
    "mg": (0.001, "mass"),
    "g": (1.0, "mass"),
    "kg": (1000.0, "mass"),
    "t": (1_000_000.0, "mass"),
    "s": (1.0, "time"),
    "min": (60.0, "time"),
    "h": (3600.0, "time"),
}
"""Unit → its size in base units, and its dimension."""

_QUANTITY = re.compile(r"(?<![\w.])(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)[ \t]*([A-Za-z]*)", re.A)


@dataclass(kw_only=True)
class Measure(TextReward):
    """Compares the last quantity in each response with the row's `answer`, such as `1.5 km`, which
    `1500 m` answers as well. A word after a number that is not one of the units above is ignored.

    A quantity is right, and earns 1, if it is within `tolerance` of the answer's and of the same
    dimension. A number alone that would be right in the answer's own unit earns `unitless_reward`;
    where the answer has no unit, a number alone earns 1. Anything else earns 0.
    """

    LIMITS: ClassVar[Limits] = {
        "tolerance": {"ge": 0, "lt": 1},
        "unitless_reward": {"ge": 0, "le": 1},
    }

    tolerance: float = 0.01
    """How far a quantity may be from the answer's, relative to that."""

    unitless_reward: float = 0.5
    """Reward for the right number without the answer's unit."""

    def score(self, response: str, answer: str) -> float:
        expected = _last_quantity(answer)
        if expected is None:
            hint = "write a number, with one of these units or none: " + ", ".join(UNITS)
            raise DataError(f"the answer {answer!r:.80} is not a quantity", hint=hint, code="F31")
        stated = _last_quantity(response)
        if stated is None:
            return 0.0
        (number, unit), (expected_number, expected_unit) = stated, expected
        if not unit:
            is_right = self._is_close(number, expected_number)
            return is_right * (self.unitless_reward if expected_unit else 1.0)
        if not expected_unit:
            return 0.0
        (size, dimension), (expected_size, expected_dimension) = UNITS[unit], UNITS[expected_unit]
        is_right = self._is_close(number * size, expected_number * expected_size)
        return float(dimension == expected_dimension and is_right)

    def _is_close(self, number: float, expected: float) -> bool:
        return abs(number - expected) <= self.tolerance * abs(expected)


def _last_quantity(text: str) -> Quantity | None:
    """The last number of a text, and its unit, if that is one of UNITS."""
    quantities = _QUANTITY.findall(text)
    if not quantities:
        return None
    digits, unit = quantities[-1]
    return float(digits.replace(",", "")), unit if unit in UNITS else ""


register_interface("their_measure", Measure)
