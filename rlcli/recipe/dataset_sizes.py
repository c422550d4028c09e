"""Whether datasets have the rows that a recipe takes from them."""

from __future__ import annotations

from collections.abc import Mapping

from rlcli.errors import DataError
from rlcli.recipe.schema import Recipe


def check_dataset_sizes(recipe: Recipe, rows_of: Mapping[str, int]) -> None:
    """`rows_of`: dataset → its rows. Raises DataError for one without rows, or with too few for a step."""
    batch, train, held_out = recipe.train.prompts_per_step, recipe.train.dataset, recipe.train.eval.dataset
    for name in (train, held_out):
        if name is not None and rows_of.get(name) == 0:
            raise DataError(f"dataset {name} has no rows", code="F80")
    rows = rows_of.get(train)
    if rows is not None and rows < batch and not recipe.takes_each_row_once:
        raise DataError(
            f"dataset {train} has {rows} rows, fewer than one step takes: prompts_per_step is {batch}",
            hint="lower train.prompts_per_step",
            code="F80",
        )
