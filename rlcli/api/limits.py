"""Bounds of a component's numbers: declared once in its class, checked with the recipe and when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Limits = Mapping[str, Mapping[str, float]]
"""Argument → its bounds, any of `BOUNDS`. Written as a literal, because it is read without importing the class:
`LIMITS: ClassVar[Limits] = {"minibatches": {"ge": 1}, "discount": {"ge": 0, "le": 1}}`."""

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def check_limits(component: Any) -> None:
    """Compare a component's numbers with the `LIMITS` of its class and its bases. Raises ValueError.

    None is always within them: it stands for "off" or for a default.
    """
    limits: dict[str, Mapping[str, float]] = {}
    for cls in reversed(type(component).__mro__):
        limits |= vars(cls).get("LIMITS", {})
    for name, bounds in limits.items():
        value = getattr(component, name)
        if value is not None and not all(_holds(value, *bound) for bound in bounds.items()):
            words = " and ".join(f"{BOUNDS[kind]} {bound}" for kind, bound in bounds.items())
            raise ValueError(f"{name} is {value}; it must be {words}")


def _holds(value: float, kind: str, bound: float) -> bool:
    return {"ge": value >= bound, "gt": value > bound, "le": value <= bound, "lt": value < bound}[kind]
