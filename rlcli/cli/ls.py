"""`rlcli ls`: components, model families, recipes and profiles, with the file of each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlcli.cli.arguments import AsJson
from rlcli.cli.output import print_json, print_table, print_text
from rlcli.errors import RlcliError


class ListedKind(StrEnum):
    """What can be listed."""

    INTERFACES = "interfaces"
    BACKENDS = "backends"
    DATASETS = "datasets"
    ENVIRONMENTS = "environments"
    FAMILIES = "families"
    RECIPES = "recipes"
    PROFILES = "profiles"


TITLES = {
    "families": "families (models that rlcli convert knows)",
    "profiles": "profiles (--with NAME applies one to a recipe)",
}


def ls(
    kind: Annotated[
        ListedKind | None, typer.Argument(help="One of these kinds; default: the names of all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List interfaces, backends, datasets, environments, model families, recipes and profiles; for
    one kind, with a description of each.

    Example: rlcli ls datasets
    """
    files_by_kind = {
        listed.value: _files(listed) for listed in ([kind] if kind else list(ListedKind))
    }
    if as_json:
        print_json(
            {
                key: [
                    {
                        "name": name,
                        "home": _home(path),
                        "where": str(path),
                        "doc": _doc(key, name, path),
                    }
                    for name, path in files.items()
                ]
                for key, files in files_by_kind.items()
            }
        )
        return
    if kind is None:
        _print_names(files_by_kind)
        return
    table = [
        (name, _home(path), _first_sentence(_doc(kind.value, name, path)))
        for name, path in files_by_kind[kind.value].items()
    ]
    print_table(["name", "home", "what it is"], table, TITLES.get(kind.value, kind.value))


def _print_names(files_by_kind: Mapping[str, Mapping[str, Path]]) -> None:
    """Print everything on one screen. No component is read."""
    rows = []
    for kind, files in files_by_kind.items():
        names: dict[str, list[str]] = {}
        for name, path in files.items():
            names.setdefault(_home(path), []).append(name)
        rows += [(kind, home, ", ".join(names_there)) for home, names_there in names.items()]
    print_table(["kind", "home", "names"], rows)
    print_text("\nrlcli ls recipes says what each is for; rlcli show NAME lists its settings")


def _files(kind: ListedKind) -> dict[str, Path]:
    """Name → file."""
    if kind in (ListedKind.RECIPES, ListedKind.PROFILES):
        from rlcli.recipe.parsing.finding import PROFILES, profile_names, recipe_names

        files = profile_names() if kind is ListedKind.PROFILES else recipe_names()
        return {name: file for name, file in files.items() if not name.startswith(PROFILES)}
    if kind is ListedKind.FAMILIES:
        from rlcli.testing.subjects import names

        return names("family")
    from rlcli import registry

    return registry.names(kind.value)


def _doc(kind: str, name: str, path: Path) -> str:
    """The first comment of a recipe, the docstring of anything else, or the problem of a broken
    file."""
    if kind in (ListedKind.RECIPES, ListedKind.PROFILES):
        return _first_comment(path)
    if kind == ListedKind.FAMILIES:
        return _docstring(path)
    from rlcli import registry

    try:
        return registry.signature(kind, name).doc
    except RlcliError as error:
        return str(error)


def _docstring(path: Path) -> str:
    """The first line of a file's docstring, or the problem of a broken file."""
    import ast

    try:
        text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    except (OSError, SyntaxError, ValueError) as error:
        return str(error)
    return text.partition("\n")[0]


def _first_comment(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            line = file.readline(400)
    except OSError as error:
        return str(error)
    return line.lstrip("# ").rstrip() if line.startswith("#") else ""


def _first_sentence(text: str) -> str:
    head, stop, _ = text.partition(". ")
    return f"{head}." if stop and not text.startswith("error[") else text


def _home(path: Path) -> str:
    """The origin of a file: rlcli, an installed package, or the user's project."""
    from rlcli.project import installed_roots, is_built_in

    package = next(
        (name for name, root in installed_roots().items() if path.is_relative_to(root)), "project"
    )
    return "built-in" if is_built_in(path) else package
