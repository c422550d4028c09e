"""What the sections of a recipe must mean together: every contradiction is noted, each at its place."""

from __future__ import annotations

from rlcli.recipe.doubts import Doubts
from rlcli.recipe.meaning import calls, devices, lengths, models, training
from rlcli.recipe.meaning.notes import Notes
from rlcli.recipe.problems import Problems
from rlcli.recipe.schema import Recipe
from rlcli.recipe.tree import Mapping


def check_meaning(recipe: Recipe, tree: Mapping, problems: Problems, doubts: Doubts) -> None:
    """Note every contradiction. `doubts`: what is known to be wrong, from which nothing is concluded."""
    notes = Notes(recipe, tree, problems, doubts)
    for room in (models, calls, training, devices, lengths):
        room.check(notes)
