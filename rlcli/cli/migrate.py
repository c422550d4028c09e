"""`rlcli migrate`: rewrite recipes of an older format."""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path
from typing import Annotated

import typer
import yaml

from rlcli.cli.arguments import AsJson, DryRun
from rlcli.cli.output import print_json, print_talk, print_text
from rlcli.errors import UsageError
from rlcli.files import not_writable, replace_file


def migrate(
    recipes: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Recipes; layers and profiles too.")
    ],
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite recipes of an older format, and report what has changed. Comments and layout are
    kept.

    Example: rlcli migrate mine.yaml --dry-run
    """
    from rlcli.recipe.authoring.migration import migrate as migrated

    outcomes: list[dict[str, object]] = []
    for path in recipes:
        text, below = _read(path)
        try:
            migration = migrated(text, str(path), below)
        except yaml.YAMLError as error:
            raise UsageError(f"not valid YAML: {error}", where=str(path), code="R07") from None
        outcomes.append(
            {"path": str(path), "changes": list(migration.changes), "text": migration.text}
        )
    for outcome in outcomes:  # only once all are readable
        if outcome["changes"] and not dry_run:
            _write(Path(str(outcome["path"])), str(outcome["text"]))
    if as_json:
        print_json(
            [
                outcome | {"written": bool(outcome["changes"]) and not dry_run}
                for outcome in outcomes
            ]
        )
        return
    for outcome in outcomes:
        _report(outcome, dry_run)


def _read(path: Path) -> tuple[str, set[str]]:
    """The text of a recipe, and the interfaces of the calls in the layers that it extends.
    Raises RecipeError."""
    from rlcli.recipe.parsing.layers import collect
    from rlcli.recipe.parsing.problems import Problems
    from rlcli.recipe.parsing.tree import at, keys_at, plain

    problems = Problems()
    layers = collect(path, problems)
    problems.raise_if_any()
    trees = [layer.tree for layer in layers[:-1]]
    kinds = [
        at(tree, ("graph", name, "interface", "type"))
        for tree in trees
        for name in keys_at(tree, ("graph",))
    ]
    return layers[-1].text, {str(plain(kind)) for kind in kinds if kind is not None}


def _write(path: Path, text: str) -> None:
    try:
        file = path.resolve()  # a link stays one
        mode = file.stat().st_mode & 0o777
        has_mark = file.read_bytes().startswith(codecs.BOM_UTF8)
        replace_file(file, text.encode("utf-8-sig" if has_mark else "utf-8"))
        file.chmod(mode)
    except OSError as error:
        raise not_writable(path, error) from None


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
