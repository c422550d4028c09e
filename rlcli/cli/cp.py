"""`rlcli cp`: create a recipe that extends another and holds only what differs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlcli.cli.arguments import AsJson, DryRun, Overrides, RecipeName, With, load
from rlcli.cli.output import print_json, print_talk, print_text
from rlcli.errors import UsageError


def cp(
    recipe: RecipeName,
    new: Annotated[
        Path,
        typer.Argument(
            metavar="NEW.yaml", help="The file to create; an existing one is not overwritten."
        ),
    ],
    overrides: Overrides = None,
    with_: With = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Create a recipe that extends another one and contains only the values given here.

    Example: rlcli cp ppo_math mine.yaml ppo.kl_ctl=0.02
    """
    from rlcli.recipe.authoring.child import child_of, write_child

    if new.exists() or new.is_symlink():
        raise UsageError(
            f"{new} already exists; not overwriting it", hint="choose another name", code="R68"
        )
    text = child_of(load(recipe, overrides, with_), new, with_ or ())
    if not dry_run:
        write_child(new, text)
        try:
            load(str(new), (), ())
        except BaseException:
            new.unlink(missing_ok=True)  # we created it, and it is unusable
            raise
    following = f"rlcli train {shlex.quote(str(new))}"
    if as_json:
        print_json({"path": str(new), "written": not dry_run, "text": text, "next": following})
        return
    print_talk(f"{'would write' if dry_run else 'wrote'} {new}")
    print_text(text.rstrip("\n"))
    print_talk(f"next: {following}" if not dry_run else "nothing was written: --dry-run")
