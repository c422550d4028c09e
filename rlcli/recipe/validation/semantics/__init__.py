"""Semantic checks across the sections of a recipe: every contradiction is reported,
each at its place."""

from __future__ import annotations

from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import MappingNode
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.schema import Recipe
from rlcli.recipe.validation.semantics import (
    calls,
    devices,
    effects,
    lengths,
    models,
    slurm,
    training,
)
from rlcli.recipe.validation.semantics.notes import Notes


def check_semantics(
    recipe: Recipe, tree: MappingNode, problems: Problems, unresolved: Unresolved
) -> None:
    """Report every contradiction. `unresolved`: what is known to be wrong, so that nothing is
    concluded from it."""
    notes = Notes(recipe, tree, problems, unresolved)
    for room in (calls, effects, models, training, devices, slurm, lengths):
        room.check(notes)
