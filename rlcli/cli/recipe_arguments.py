"""Recipe arguments that all verbs share: its name or file, more layers, overrides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name or file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Override recipe values.")]
With = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="LAYER", help="Apply a profile or recipe file on top; repeatable."),
]


def load(recipe: str, overrides: Sequence[str] | None, with_: Sequence[str] | None) -> Resolved:
    """The recipe, ready to run. Raises RecipeError with all problems."""
    from rlcli.recipe.resolve import load_recipe

    return load_recipe(recipe, overrides or (), with_ or ())
