"""`rlcli migrate`: rewrite recipes of an older format."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
import yaml

from rlcli.cli.arguments import AsJson, DryRun
from rlcli.cli.output import print_json, print_talk, print_text
from rlcli.errors import ResourceError, UsageError
from rlcli.files import read_text, replace_file


def migrate(
    recipes: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Recipes; layers and profiles too.")],
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite recipes of an older format, and say what has changed. Comments and layout stay.

    Example: rlcli migrate mine.yaml --dry-run
    """
    from rlcli.recipe.migration import migrate as migrated

    outcomes = []
    for path in recipes:
        try:
            migration = migrated(read_text(path))
        except yaml.YAMLError as error:
            raise UsageError(f"not valid YAML: {error}", where=str(path), code="R07") from error
        if migration.changes and not dry_run:
            _write(path, migration.text)
        outcomes.append({"path": str(path), "changes": list(migration.changes), "text": migration.text})
    if as_json:
        print_json([outcome | {"written": bool(outcome["changes"]) and not dry_run} for outcome in outcomes])
        return
    for outcome in outcomes:
        _report(outcome, dry_run)


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ResourceError(f"not writable: {error.strerror or error}", where=str(path), code="F75") from None


def _report(outcome: dict[str, object], dry_run: bool) -> None:
    path, changes = outcome["path"], outcome["changes"]
    assert isinstance(changes, list)
    if not changes:
        print_text(f"{path}: nothing to change")
        return
    print_text(f"{path}: {'would be ' if dry_run else ''}rewritten")
    for change in changes:
        print_text(f"  {change}")
    print_talk(f"next: rlcli validate {shlex.quote(str(path))}")
