"""Valid recipe settings that are rarely intended: warnings, not errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcli.api.dataflow import weight_writers
from rlcli.inspect.processor import slow_dtypes
from rlcli.recipe.graph import train_graph

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved


def recipe_warnings(resolved: Resolved) -> Iterator[str]:
    """Warnings, each with its place. Nothing is loaded for them."""
    yield from slow_dtypes(resolved)
    yield from _samplers_left_behind(resolved)


def _samplers_left_behind(resolved: Resolved) -> Iterator[str]:
    """A role that generates, began as a copy of one that is trained, and never gets its weights."""
    recipe = resolved.recipe
    writers = weight_writers(train_graph(recipe))
    for name, call in recipe.graph.items():
        source = recipe.models[call.model].init
        if call.call == "generate" and call.model not in writers and source in writers:
            location = resolved.origin(("graph", name, "model"))
            yield (
                f"{location}: each step {name} samples with the weights that {call.model} began "
                f"with, while {source} is trained; "
                f"graph.{writers[source][0]}.hooks.copy_to={call.model} makes it follow"
            )
