"""Verbs as typer sees them: with rlcli's own help pages, its messages for unknown verbs, and
imported when used."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rlcli.cli.help import WIDEST, page
from rlcli.cli.mistakes import unknown_verb
from rlcli.cli.output import write_text


class VerbCommand(TyperCommand):
    """A verb; its help is one screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _show(page(self, ctx))


class VerbGroup(TyperGroup):
    """A verb with subcommands, such as `ckpt`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            raise unknown_verb(ctx.command_path, args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        verbs = [
            (name, self.commands[name].get_short_help_str(WIDEST))
            for name in self.list_commands(ctx)
        ]
        _show(page(self, ctx, [("", verbs)]))


class LazyVerbs(VerbGroup):
    """All verbs by name; the module of a verb is imported when the verb is used."""

    table: Mapping[str, Mapping[str, str]] = {}
    """Group → verb → one-line description."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for verbs in self.table.values() for name in verbs]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command_of(cmd_name) if cmd_name in self.list_commands(ctx) else None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _show(
            page(self, ctx, [(group, list(verbs.items())) for group, verbs in self.table.items()])
        )


def _show(text: str) -> NoReturn:
    """Print a page like all other output, and exit: the parser's own printing mishandles a closed
    pipe."""
    write_text(text)
    raise typer.Exit


def command_of(verb: str) -> Any:
    """The command of a verb: `rlcli/cli/<verb>.py` has a function of that name, or a Typer with
    several commands."""
    module = importlib.import_module(f"rlcli.cli.{verb.replace('-', '_')}")
    definition = getattr(module, verb.replace("-", "_"))
    if not isinstance(definition, typer.Typer):
        alone = new_typer()
        alone.command(verb, cls=_class_of(definition))(definition)
        definition = alone
    command = typer.main.get_command(definition)
    command.name = verb
    return command


def _class_of(definition: Callable[..., Any]) -> type[VerbCommand]:
    """The class of a verb's command: verbs with `--with` take a recipe."""
    if "with_" not in inspect.signature(definition).parameters:
        return VerbCommand
    from rlcli.cli.short_options import RecipeCommand

    return RecipeCommand


def new_typer(**options: Any) -> typer.Typer:
    """A Typer with rlcli's own help pages, error handling and completion."""
    settings = {"help_option_names": ["-h", "--help"]}
    plain = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
    return typer.Typer(**{"cls": VerbGroup, "context_settings": settings, **plain, **options})
