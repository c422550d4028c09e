"""`rlcli validate`: read a recipe and say all that is wrong with it."""

from __future__ import annotations

from typing import Annotated

import typer


def validate(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value …")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a recipe, and those it starts from, without starting anything.

    Example: rlcli validate ppo_math train.steps=100
    """
    from rlcli.cli.output import print_json, print_text
    from rlcli.recipe.resolve import load_recipe
    from rlcli.recipe.warm_start import chain

    resolved = load_recipe(recipe, overrides or ())
    first = [source.recipe.name for source in chain(resolved)]
    layers = [layer.file for layer in resolved.layers]
    if as_json:
        print_json(
            {
                "ok": True,
                "recipe": resolved.recipe.name,
                "layers": layers,
                "runs_first": first,
                "problems": [],
            }
        )
        return
    words = f"{len(layers)} layer{'s' if len(layers) > 1 else ''}, {len(resolved.origins)} values set"
    after = f"; runs after {', '.join(first)}" if first else ""
    print_text(f"ok  {layers[-1]}  {words}{after}")
