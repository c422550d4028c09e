"""How long prompts and sequences of a training step may get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.api.key_meaning import PROMPTS
from rlcli.recipe.components import argument_of, dataset_keys
from rlcli.recipe.lengths import generation_of, limit_of_rows, responses_of, sequences_of_row

if TYPE_CHECKING:
    from rlcli.recipe.schema import Component, Recipe

ASSUMED = 1024
"""Tokens of the longest row of a dataset that does not say."""


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens."""

    prompt: int
    """Longest prompt; 0 if rows are whole sequences."""
    sequence: int
    """Longest sequence, including its response."""
    assumed: bool
    """The dataset does not say, so ASSUMED was used."""


def lengths_of(recipe: Recipe) -> Lengths:
    """Longest prompt and sequence of a training step."""
    component = recipe.datasets[recipe.train.dataset]
    row = longest_row(component)
    generating = [call for call in recipe.graph.values() if call.call == "generate"]
    if (
        PROMPTS not in (dataset_keys(recipe.datasets, recipe.train.dataset) or ())
        and not generating
    ):
        return Lengths(0, row or ASSUMED, row is None)
    new = max(
        (int(generation_of(recipe, call)["max_new_tokens"]) for call in generating), default=0
    )
    return Lengths(row or ASSUMED, (row or ASSUMED) + new, row is None)


def longest_row(dataset: Component) -> int | None:
    """Tokens: as set in the recipe or by the dataset's class, or else the default limit;
    None if there is none."""
    limit = limit_of_rows(dataset) or argument_of("datasets", dataset, "max_length")
    return limit if isinstance(limit, int) and limit > 0 else None


def group_size(recipe: Recipe) -> int:
    """Sequences of a sample: the responses to a prompt or, if nothing is generated,
    what a row holds."""
    generating = [call for call in recipe.graph.values() if call.call == "generate"]
    if not generating:
        return sequences_of_row(recipe)
    return max(responses_of(recipe, call) for call in generating)
