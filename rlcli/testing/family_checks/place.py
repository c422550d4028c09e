"""Where to look in a family's file."""

from __future__ import annotations

from rlcli.api.family import HFFamily
from rlcli.testing.contract import place_of


def place_in(family: HFFamily, method: str) -> str:
    """`file:line` of a method, or of the class if the method is inherited."""
    return place_of(vars(type(family)).get(method) or type(family))
