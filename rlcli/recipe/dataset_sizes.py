"""The rows that a recipe takes from datasets: how many steps they make, and whether they exist."""

from __future__ import annotations

from collections.abc import Mapping

from rlcli.errors import DataError, UsageError
from rlcli.recipe.schema import Recipe


def training_steps(
    recipe: Recipe, rows_of: Mapping[str, int | None], done: int = 0, samples: int = 0
) -> int:
    """Total number of steps of a run, from the rows of each dataset. Raises DataError if one has
    too few, UsageError R49 if one that must know its number of rows does not.

    `done` steps have already taken `samples` rows, perhaps in steps of another size.
    """
    check_dataset_sizes(recipe, rows_of)
    if recipe.train.steps is not None:
        return recipe.train.steps
    rows = rows_of[recipe.train.dataset]
    assert rows is not None  # ensured by `check_dataset_sizes`
    left = rows * (recipe.train.epochs or 1) - samples
    return done - (-left // recipe.train.prompts_per_step)


def check_dataset_sizes(recipe: Recipe, rows_of: Mapping[str, int | None]) -> None:
    """`rows_of`: dataset → its number of rows, None for a stream, where it is unknown. Raises
    DataError for a dataset without rows, or with too few for a step, UsageError R49 for a stream
    where the number must be known."""
    batch, train, held_out = (
        recipe.train.prompts_per_step,
        recipe.train.dataset,
        recipe.train.eval.dataset,
    )
    for name in (train, held_out):
        if name is not None and rows_of.get(name) == 0:
            raise DataError(f"dataset {name} has no rows", code="F80")
    _check_streams(recipe, {name for name, rows in rows_of.items() if rows is None})
    rows = rows_of.get(train)
    if rows is not None and rows < batch and not recipe.takes_each_row_once:
        raise DataError(
            (
                f"dataset {train} has {rows} row{'s'[: rows != 1]}, fewer than one step takes: "
                f"prompts_per_step is {batch}"
            ),
            hint="lower train.prompts_per_step",
            code="F80",
        )


def _check_streams(recipe: Recipe, streams: set[str]) -> None:
    train, every = recipe.train, recipe.checkpoint.every_epochs
    wrong: dict[str, str] = {}
    if train.dataset in streams and train.steps is None:
        wrong["train.epochs"] = "set train.steps instead"
    if train.dataset in streams and every is not None:
        wrong["checkpoint.every_epochs"] = "set checkpoint.every_steps instead"
    if train.eval.dataset in streams:
        wrong["train.eval.dataset"] = "evaluate on a dataset whose number of rows is known"
    for where, hint in wrong.items():
        message = "the dataset is a stream, whose number of rows is unknown"
        raise UsageError(message, where=where, hint=hint, code="R49")
