"""`rlcli schema`: the JSON Schema of recipes, also for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.output import print_json, print_talk, print_text
from rlcli.errors import UsageError

if TYPE_CHECKING:
    from rlcli.recipe.introspection.editor import FileChange


def schema(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="[SECTION or COMPONENT]", help="Such as train.eval or ppo_actor."),
    ] = None,
    install: Annotated[
        bool,
        typer.Option("--install", help="Write it into the project, with a setting for VS Code."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --install: only say what would be written.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="With --install: report it as JSON; the schema is JSON anyway."
        ),
    ] = False,
) -> None:
    """Print the JSON Schema of recipes, of a section, or of a component's arguments.

    Example: rlcli schema train.eval
    """
    from rlcli.recipe.introspection.json_schema import schema_of

    if install and subject is not None:
        raise UsageError(
            "--install writes the schema of whole recipes", hint="rlcli schema --install"
        )
    if dry_run and not install:
        raise UsageError("--dry-run goes with --install", hint="rlcli schema --install --dry-run")
    if install:
        _install(dry_run, as_json)
    else:
        print_json(schema_of(subject))


def _install(dry_run: bool, as_json: bool) -> None:
    from pathlib import Path

    from rlcli.project import current_project
    from rlcli.recipe.introspection import editor
    from rlcli.recipe.introspection.json_schema import recipe_schema

    folder = current_project() or Path.cwd()
    changes = editor.planned(folder, recipe_schema())
    if not dry_run:
        editor.install(folder, changes)
    if as_json:
        files = [{"path": str(folder / change.path), "state": change.state} for change in changes]
        print_json({"folder": str(folder), "written": not dry_run, "files": files})
        return
    _say(folder, changes, dry_run)


def _say(folder: object, changes: list[FileChange], dry_run: bool) -> None:
    from rlcli.recipe.introspection import editor

    print_text(f"{'would write' if dry_run else 'wrote'} for editors, in {folder}")
    for change in changes:
        print_text(f"  {change.state:<10}  {change.path}")
        if change.state == "left alone":
            print_text(f"    its entries cannot be read; add  {change.text.strip()}")
        elif dry_run and change.path == editor.SETTINGS_FILE and change.state != "unchanged":
            print_text("\n".join(f"    | {line}" for line in change.text.splitlines()))
    print_talk("VS Code: the extension redhat.vscode-yaml reads it, for recipes/**/*.yaml.")
    print_talk(f"other editors, or files elsewhere: {editor.MODELINE}{editor.SCHEMA_FILE}")
    print_talk(
        "next: rlcli schema --install"
        if dry_run
        else "after you add or change a component: rlcli schema --install once more"
    )
