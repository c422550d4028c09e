"""`--model`, `--data` and `--reward`: short for overrides, in every verb that takes a recipe."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.help import GROUP_OF_RECIPE
from rlcli.cli.output import print_talk
from rlcli.cli.verbs import VerbCommand, new_typer
from rlcli.errors import UsageError

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved

WORDS = "rlcli.words"
"""Key of a command's context: what followed the recipe, if one of these options did."""


def short_options(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The model to train: a folder, or owner/name on the Hub.",
            rich_help_panel=GROUP_OF_RECIPE,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Its rows: a file, a folder, or hf:owner/name.",
            rich_help_panel=GROUP_OF_RECIPE,
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The interface that rewards responses.",
            rich_help_panel=GROUP_OF_RECIPE,
        ),
    ] = None,
) -> None:
    """Only its options are used: those that a recipe's verbs have in addition to their own."""


class RecipeCommand(VerbCommand):
    """A verb that takes a recipe and overrides."""

    def __init__(self, *args: Any, params: list[Any] | None = None, **settings: Any):
        super().__init__(*args, params=[*(params or []), *_options()], **settings)

    def invoke(self, ctx: Any) -> Any:
        values = {option.name: ctx.params.pop(option.name) for option in _options()}
        options = {name: value for name, value in values.items() if value is not None}
        for name, value in options.items():
            if not value.strip():
                raise UsageError(f"--{name} is empty", hint="is a variable of the shell not set?")
        if options:
            _add_overrides(ctx, options)
        return super().invoke(ctx)


def _options() -> list[Any]:
    alone = new_typer()
    alone.command("alone")(short_options)
    command: Any = typer.main.get_command(alone)
    return [option for option in command.params if option.name in short_options.__annotations__]


def tell_recipe(resolved: Resolved, context: typer.Context) -> None:
    """Print the recipe that a command line with these options describes, and how to keep it."""
    from rlcli.recipe.authoring.child import child_of

    if (words := context.meta.get(WORDS)) is None or context.params.get("quiet"):
        return
    file = f"my_{resolved.path.stem}.yaml"
    try:
        text = child_of(resolved, Path(file), resolved.profiles)
    except UsageError:
        return  # no file in this folder can extend the recipe
    print_talk(text)
    print_talk(f"keep it: rlcli cp {shlex.quote(context.params['recipe'])} {file} {words}\n")


def _add_overrides(ctx: Any, options: dict[str, str]) -> None:
    """Put the overrides that the options stand for in front of those that are written."""
    from rlcli.recipe.shorthand import as_overrides

    profiles = ctx.params["with_"] or ()
    # `show` has both in one argument
    recipe, *written = ctx.params.get("words") or (
        ctx.params["recipe"],
        *(ctx.params["overrides"] or ()),
    )
    overrides = [*as_overrides(recipe, profiles, **options), *written]
    if "words" in ctx.params:
        ctx.params["words"] = [recipe, *overrides]
    else:
        ctx.params["overrides"] = overrides
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    layers = [word for profile in profiles for word in ("--with", profile)]
    ctx.meta[WORDS] = shlex.join([*words, *layers, *written])
