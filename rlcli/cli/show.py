"""`rlcli show`: a component's fields and docs, or a resolved recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.registry import Argument, Signature

KINDS = {"interface": "interfaces", "backend": "backends", "dataset": "datasets"}


def show(
    what: Annotated[list[str], typer.Argument(help="[interface|backend|dataset] NAME, or RECIPE [key=value …]")],
    origins: Annotated[bool, typer.Option("--origins", help="Of a recipe: where each value is set.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a component can be told, or a recipe with all layers and defaults in place.

    Examples: rlcli show ppo_actor · rlcli show ppo_math --origins
    """
    from rlcli.errors import UsageError

    kind = KINDS.get(what[0].removesuffix("s"))
    if kind is not None and len(what) > 1:
        if len(what) > 2 or origins:
            raise UsageError(f"rlcli show {what[0]} takes one name", hint=f"rlcli show {what[0]} {what[1]}")
        _show_components([(kind, what[1])], as_json)
        return
    homes = _homes(what[0])
    if homes and len(what) == 1 and not origins:
        _show_components(homes, as_json)
        return
    _show_recipe(what[0], what[1:], origins, as_json)


def _homes(name: str) -> list[tuple[str, str]]:
    """The kinds that have a component of this name."""
    from rlcli import registry
    from rlcli.api.component import module_name

    return [(kind, name) for kind in KINDS.values() if module_name(name) in registry.names(kind)]


def _show_components(homes: list[tuple[str, str]], as_json: bool) -> None:
    from rlcli import registry
    from rlcli.cli.output import print_json, print_table, print_text

    signatures = [registry.signature(kind, name) for kind, name in homes]
    if as_json:
        documents = [_component_json(signature) for signature in signatures]
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    from rlcli.recipe.layers import shown

    for signature in signatures:
        print_text(f"{signature.kind.removesuffix('s')} {signature.name} · {shown(signature.path)}:{signature.line}")
        print_text(f"{signature.doc}\n" if signature.doc else "")
        if signature.kind == "interfaces":
            print_text("calls  " + ", ".join(_calls(signature)) + "\n")
        rows = [
            (
                name,
                f"{argument.annotation} = {_default(argument)}" if not argument.required else argument.annotation,
                doc,
            )
            for name, argument, doc in _rows(signature.arguments)
        ]
        if rows:
            print_table(["args", "type and default", "meaning"], rows)
        else:
            print_text("takes no args")


def _calls(signature: Signature) -> list[str]:
    from rlcli.api.dataflow import ModelInterfaceType

    return [call.value for call in ModelInterfaceType if call.value in signature.methods]


def _rows(arguments: tuple[Argument, ...], prefix: str = "") -> Iterator[tuple[str, Argument, str]]:
    for argument in arguments:
        doc = " ".join(argument.doc.split())
        yield prefix + argument.name, argument, doc
        yield from _rows(argument.fields, f"{prefix}{argument.name}.")


def _default(argument: Argument) -> str:
    from rlcli.registry import COMPUTED

    if argument.default is COMPUTED:
        return argument.default_text or "computed"
    words = {None: "null", True: "true", False: "false"}
    plain = argument.default is None or isinstance(argument.default, bool)
    return words[argument.default] if plain else str(argument.default)


def _component_json(signature: Signature) -> dict[str, Any]:
    return {
        "kind": signature.kind.removesuffix("s"),
        "name": signature.name,
        "file": str(signature.path),
        "line": signature.line,
        "doc": signature.doc,
        "calls": _calls(signature) if signature.kind == "interfaces" else [],
        "args": [
            {
                "name": name,
                "type": argument.annotation,
                "required": argument.required,
                "default": argument.default_text,
                "doc": doc,
            }
            for name, argument, doc in _rows(signature.arguments)
        ],
    }


def _show_recipe(name: str, overrides: list[str], origins: bool, as_json: bool) -> None:
    from rlcli.cli.output import print_json, print_text
    from rlcli.recipe.resolve import load_recipe

    resolved = load_recipe(name, overrides)
    if as_json:
        document: dict[str, Any] = {
            "recipe": resolved.to_json(),
            "layers": [layer.file for layer in resolved.layers],
        }
        print_json(document | ({"origins": resolved.origins} if origins else {}))
    elif origins:
        for key, value, origin in _with_origins(resolved):
            print_text(f"{f'{key} = {value}':<58}  {origin}")
    else:
        print_text(resolved.to_yaml().rstrip("\n"))


def _with_origins(resolved: Resolved) -> Iterator[tuple[str, str, str]]:
    """(key, value, origin) of every value, defaults included."""
    from rlcli.recipe.write import to_yaml

    def walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                yield from walk(item, (*path, key))
        else:
            text = to_yaml({"v": value}).removeprefix("v: ").rstrip("\n")
            yield ".".join(path), text, str(resolved.origin(path))

    return walk(resolved.to_json(), ())
