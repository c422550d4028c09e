"""What other frameworks call the arguments of a component."""

from __future__ import annotations

from collections.abc import Mapping

Synonyms = Mapping[str, str]
"""Argument → its names elsewhere, separated by blanks: their last part, or their last parts where one would not do. An
error about one in a recipe gives the argument. Written as a literal, because it is read without importing the class:
`SYNONYMS: ClassVar[Synonyms] = {"discount": "gamma"}`."""
