"""What other frameworks call a component and its arguments.

A component's names elsewhere, or those of the components that it resembles most, are a literal too,
separated by spaces: `ELSEWHERE: ClassVar[str] = "rw_pair preference"`. An error about such a name
gives the component.
"""

from __future__ import annotations

from collections.abc import Mapping

Synonyms = Mapping[str, str]
"""Argument → its names elsewhere, separated by spaces: their last part, or last parts if one is not
enough. An error about such a name in a recipe gives the argument. Written as a literal, because it
is read without importing the class: `SYNONYMS: ClassVar[Synonyms] = {"discount": "gamma"}`."""
