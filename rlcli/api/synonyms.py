"""What other frameworks call the arguments of a component."""

from __future__ import annotations

from collections.abc import Mapping

Synonyms = Mapping[str, str]
"""Argument → its names elsewhere, separated by spaces: their last part, or last parts if one is not
enough. An error about such a name in a recipe gives the argument. Written as a literal, because it
is read without importing the class: `SYNONYMS: ClassVar[Synonyms] = {"discount": "gamma"}`."""
