"""Where the problems of one section of a recipe are reported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import KeyPath, Mark, keys_at
from rlcli.recipe.schema import SECTIONS
from rlcli.recipe.validation.argument_words import argument_words


@dataclass
class CheckedSection:
    """A section that is checked against its model: the whole recipe, or what is at `prefix`."""

    model: type[BaseModel]
    problems: Problems
    prefix: KeyPath
    top: list[str]
    """The keys allowed at its top."""
    component: str | None
    """The component whose arguments these are."""

    def add(self, code: str, message: str, path: KeyPath, mark: Mark, **details: Any) -> None:
        """Report a problem with the keys around a path."""
        section = str((*self.prefix, *path, "")[0])
        about = self.component or (section if section in SECTIONS else None)
        self.problems.add(code, message, mark, about=about, section=self.in_recipe(path), **details)

    def in_recipe(self, path: KeyPath) -> KeyPath:
        """The path in the recipe of one in this section."""
        return (*self.prefix, *path)

    @property
    def roles(self) -> list[str]:
        """The names of the recipe's roles, if it got that far."""
        return keys_at(self.problems.written, ("models",))

    @cached_property
    def words(self) -> dict[str, str]:
        """Other frameworks' names for arguments of the recipe's interfaces."""
        return argument_words(self.problems.written)
