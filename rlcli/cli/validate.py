"""`rlcli validate`: check a recipe and report every problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from rlcli.cli.arguments import AsJson, Overrides, RecipeName, With, load
from rlcli.cli.output import print_json, print_talk, print_text
from rlcli.errors import raise_all
from rlcli.project import search_paths_kept
from rlcli.units import count


@search_paths_kept()
def validate(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing if the recipe is valid.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a recipe, and those it starts from, without starting anything.

    Example: rlcli validate ppo_math train.steps=100
    """
    from rlcli.inspect.doubtful import recipe_warnings
    from rlcli.recipe.parsing.finding import shown
    from rlcli.recipe.requirements_here import missing_here
    from rlcli.recipe.warm_start import chain
    from rlcli.topology.layouts import layout_errors

    resolved = load(recipe, overrides, with_)
    runs_first = chain(resolved)
    runs = (*runs_first, resolved)
    for find_errors in (layout_errors, missing_here):
        raise_all(error for run in runs for error in find_errors(run))
    first = [source.recipe.name for source in runs_first]
    warnings = [warning for run in runs for warning in recipe_warnings(run)]
    layers = [layer.file for layer in resolved.layers]
    if as_json:
        print_json(
            {
                "ok": True,
                "recipe": resolved.recipe.name,
                "layers": layers,
                "runs_first": first,
                "problems": [],
                "warnings": warnings,
            }
        )
        return
    for warning in warnings:
        print_talk(f"warning: {warning}")
    if quiet:
        return
    print_text(f"ok  {shown(resolved.path)}\n    {_words(len(layers), resolved.values_set, first)}")


def _words(layers: int, values: int, first: Sequence[str]) -> str:
    after = f"; runs after {', '.join(first)}" if first else ""
    return f"{count(layers, 'layer')}, {values} values set{after}"
