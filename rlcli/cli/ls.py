"""`rlcli ls`: components and recipes, with where each lives."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Kind(StrEnum):
    """What can be listed."""

    INTERFACES = "interfaces"
    BACKENDS = "backends"
    DATASETS = "datasets"
    RECIPES = "recipes"


def ls(
    kind: Annotated[Kind | None, typer.Argument(help="Which of them; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List interfaces, backends, datasets and recipes.

    Example: rlcli ls datasets
    """
    from rlcli.cli.output import print_json, print_table

    found = {one.value: _entries(one) for one in ([kind] if kind else list(Kind))}
    if as_json:
        names = ("name", "where", "doc")
        print_json({key: [dict(zip(names, entry, strict=True)) for entry in rows] for key, rows in found.items()})
        return
    for title, rows in found.items():
        print_table(["name", "where", "what it is"], [(name, _short(where), doc) for name, where, doc in rows], title)


def _entries(kind: Kind) -> list[tuple[str, str, str]]:
    """(name, file, one line on what it is)."""
    if kind is Kind.RECIPES:
        from rlcli.recipe.layers import recipe_names

        return [(name, str(path), _first_comment(path)) for name, path in recipe_names().items()]
    from rlcli import registry

    return [(name, str(path), _doc(kind.value, name)) for name, path in registry.names(kind.value).items()]


def _doc(kind: str, name: str) -> str:
    """The first line of the component's docstring; a broken file is listed with what is wrong."""
    from rlcli import registry
    from rlcli.errors import RlcliError

    try:
        return registry.signature(kind, name).doc
    except RlcliError as error:
        return str(error)


def _first_comment(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            line = file.readline(400)
    except OSError as error:
        return str(error)
    return line.lstrip("# ").rstrip() if line.startswith("#") else ""


def _short(where: str) -> str:
    from rlcli.project import is_built_in
    from rlcli.recipe.layers import shown

    return "built-in" if is_built_in(Path(where)) else shown(Path(where))
