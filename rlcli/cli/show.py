"""`rlcli show`: a component's arguments and docs, or a resolved recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.arguments import With, load
from rlcli.cli.output import print_json, print_talk, print_text, wrapped
from rlcli.errors import UsageError
from rlcli.spelling import did_you_mean

if TYPE_CHECKING:
    from rlcli.recipe.introspection.readable import YamlLine
    from rlcli.recipe.resolve import Resolved
    from rlcli.registry import Argument, Signature

WIDTH = 80
KINDS = {
    "interface": "interfaces",
    "backend": "backends",
    "dataset": "datasets",
    "environment": "environments",
}

METRICS = "metrics"
"""Shown instead of a recipe of this name, which can be given as a path."""

NOT_FOUND = "R51"
"""The code of a name that nothing has, as for every verb that takes a recipe."""

SET_BY = {
    "interfaces": "graph.<call>.interface.args.<arg>",
    "backends": "models.<role>.backend.args.<arg>",
    "datasets": "datasets.<name>.args.<arg>",
    "environments": "graph.<call>.interface.args.environment_args.<arg>",
}
"""Where a recipe holds the arguments of components of each kind."""


def show(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME [KEY=VALUE]...",
            help=(
                "A recipe, a section such as train, a component: [KIND] NAME, or metrics [TEXT]."
            ),
        ),
    ],
    with_: With = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="For a recipe: show where each value is set.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="For a recipe: include all defaults.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all defaults.")] = False,
) -> None:
    """Show a recipe with all layers merged and references resolved, the keys of a section, a
    component's options, or what the metrics of runs mean.

    Example: rlcli show ppo_math --origins
    """
    name, *others = words
    of_recipe = bool(with_) or origins or every
    if name == METRICS and not of_recipe:
        _show_metrics(others, as_json)
        return
    kind = KINDS.get(name.removesuffix("s"))
    if kind is not None and others:
        if len(others) > 1 or of_recipe:
            raise UsageError(
                f"rlcli show {name} takes one name", hint=f"rlcli show {name} {others[0]}"
            )
        _show_components([(kind, others[0])], as_json)
        return
    if not others and not of_recipe and _show_by_name(name, as_json):
        return
    for word in others:
        if "=" not in word:
            hint = f"a value or section of a recipe: rlcli explain {name} {word}"
            raise UsageError(f"{word!r} is not KEY=VALUE", hint=hint)
    _show_recipe(load(name, others, with_), origins, every, as_json)


def _show_by_name(name: str, as_json: bool) -> bool:
    """Print the components of a name, or the section; False for a recipe. Raises UsageError for a
    name that nothing has."""
    if homes := _homes(name):
        _show_components(homes, as_json)
        return True
    if _show_section(name, as_json):
        return True
    _check_name(name)
    return False


def _check_name(name: str) -> None:
    """Raises UsageError for a name that no recipe has, saying what it is instead, or which names
    are similar."""
    from rlcli import registry
    from rlcli.recipe.parsing.finding import recipe_names
    from rlcli.recipe.schema import SECTIONS
    from rlcli.recipe.synonyms import absent
    from rlcli.registry.listing import called_elsewhere

    recipes = recipe_names()
    if name.removesuffix(".yaml").removeprefix("recipes/") in recipes or Path(name).exists():
        return
    if advice := absent(name):
        raise UsageError(f"there is no {name} here", hint=advice, code=NOT_FOUND)
    for kind in KINDS.values():
        if component := called_elsewhere(kind, name):
            hint = f"rlcli show {component}"
            raise UsageError(f"nothing is named {name!r} here", hint=hint, code=NOT_FOUND)
    _check_key(name)
    components = [component for kind in KINDS.values() for component in registry.names(kind)]
    near = did_you_mean(name, [*SECTIONS, *components, *recipes], "rlcli ls lists what there is")
    raise UsageError(f"nothing is named {name!r} here", hint=near, code=NOT_FOUND)


def _check_key(name: str) -> None:
    """Raises UsageError for the name of a key of recipes, or of an argument of components."""
    from rlcli.recipe.suggest import homes

    if name in homes():
        section = homes()[name][0].rpartition(".")[0] or name
        raise UsageError(f"{name} is a key of {section}", hint=f"rlcli show {section}")
    if owners := _owners(name):
        message = f"{name} is an argument of {', '.join(owners)}"
        raise UsageError(message, hint=f"rlcli show {owners[0]}")


def _owners(argument: str) -> list[str]:
    """The components that have an argument of that name."""
    from rlcli import registry
    from rlcli.recipe.components import known_signature

    components = [(kind, name) for kind in KINDS.values() for name in registry.names(kind)]
    signatures = [known_signature(kind, name) for kind, name in components]
    return [
        signature.name
        for signature in signatures
        if signature is not None and any(each.name == argument for each in signature.arguments)
    ]


def _show_metrics(texts: Sequence[str], as_json: bool) -> None:
    """Print the metrics whose names contain one of some texts, or all of them."""
    from rlcli.recipe.introspection.metrics import all_metrics

    metrics = [
        metric
        for metric in all_metrics()
        if not texts or any(text in metric.name for text in texts)
    ]
    if not metrics:
        raise UsageError(
            f"no metric's name contains {' or '.join(texts)}",
            hint="rlcli show metrics lists all of them",
        )
    if as_json:
        print_json({"metrics": [vars(metric) for metric in metrics]})
        return
    for metric in metrics:
        print_text(f"  {metric.name}  {metric.unit}")
        reported_by = f" ({', '.join(metric.interfaces)})" if metric.interfaces else ""
        print_text(wrapped(metric.meaning + reported_by, " " * 6, " " * 6))


def _show_section(name: str, as_json: bool) -> bool:
    """Print the keys of a section, whose name no recipe may have; False if it is not a section."""
    from rlcli.recipe.introspection.fields import fields_under
    from rlcli.recipe.schema import SECTIONS

    fields = fields_under(name) if name.split(".")[0] in SECTIONS else []
    rows = [
        (key, field.type, None if field.required else str(field.default_text), field.doc)
        for key, field in fields
    ]
    if as_json and rows:
        print_json(
            {"section": name, "keys": [dict(zip(_COLUMNS, row, strict=True)) for row in rows]}
        )
    elif rows:
        print_text(f"keys of {name}")
        _print_keys(rows)
    return bool(rows)


_COLUMNS = ("name", "type", "default", "doc")


def _print_keys(rows: Sequence[tuple[str, str, str | None, str]]) -> None:
    """Print each key with its type, its default (None: required) and its meaning."""
    for name, kind, default, doc in rows:
        line = f"  {name}  {kind}"
        if default is None:
            line += ", required"
        elif default:
            line += f" = {default}"
        print_text(line)
        if doc:
            print_text(wrapped(doc, " " * 6, " " * 6))


def _homes(name: str) -> list[tuple[str, str]]:
    """The kinds that have a component with this name, which may be that of an installed module."""
    from rlcli import registry
    from rlcli.api.component import module_name
    from rlcli.recipe.components import known_signature

    if "." in name:
        return [(kind, name) for kind in KINDS.values() if known_signature(kind, name) is not None]
    return [(kind, name) for kind in KINDS.values() if module_name(name) in registry.names(kind)]


# -- components ------------------------------------------------------------------------------------


def _show_components(homes: list[tuple[str, str]], as_json: bool) -> None:
    from rlcli import registry

    signatures = [registry.signature(kind, name) for kind, name in homes]
    if as_json:
        documents = [_component_json(signature) for signature in signatures]
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    for signature in signatures:
        _print_component(signature)


def _print_component(signature: Signature) -> None:
    from rlcli.recipe.introspection.fields import arguments_in
    from rlcli.recipe.parsing.finding import shown

    print_text(
        f"{signature.kind.removesuffix('s')} {signature.name} · "
        f"{shown(signature.path)}:{signature.line}"
    )
    if signature.doc:
        print_text(wrapped(signature.doc))
    if signature.kind == "interfaces":
        print_text("calls: " + ", ".join(_calls(signature)))
    if signature.kind == "environments":
        print_text(f"tools: {_tools_in_words(signature)}")
    print_text()
    arguments = list(arguments_in(signature))
    if not arguments:
        print_text("takes no args")
        return
    print_text("args")
    _print_keys(
        [
            (name, *_type_and_default(signature, argument), " ".join(argument.doc.split()))
            for name, argument in arguments
        ]
    )
    print_talk(f"in a recipe: {SET_BY[signature.kind]}")


def _type_and_default(signature: Signature, argument: Argument) -> tuple[str, str | None]:
    from rlcli.recipe.introspection.fields import argument_type, default_text

    default = "" if argument.fields else default_text(argument)  # for a section, its fields follow
    return argument_type(
        signature, argument
    ), None if argument.required and not argument.fields else default


def _calls(signature: Signature) -> list[str]:
    from rlcli.api.dataflow import ModelInterfaceType

    return [call.value for call in ModelInterfaceType if call.value in signature.methods]


def _tools(signature: Signature) -> list[str] | None:
    """None: they are known where it is played, and not before."""
    from rlcli.api.environment import is_tool

    if "tool_schemas" in signature.methods:
        return None
    return sorted(filter(is_tool, signature.methods))


def _tools_in_words(signature: Signature) -> str:
    names = _tools(signature)
    if names is None:
        return "those that it states where it is played"
    return ", ".join(names) or "none"


def _component_json(signature: Signature) -> dict[str, Any]:
    from rlcli.recipe.introspection.fields import argument_type, arguments_in

    document = {
        "kind": signature.kind.removesuffix("s"),
        "name": signature.name,
        "file": str(signature.path),
        "line": signature.line,
        "doc": signature.doc,
        "calls": _calls(signature) if signature.kind == "interfaces" else [],
    }
    if signature.kind == "environments":
        document["tools"] = _tools(signature)
    document["args"] = [
        {
            "name": name,
            "type": argument_type(signature, argument),
            "required": argument.required,
            "default": argument.default_text,
            "doc": " ".join(argument.doc.split()),
        }
        for name, argument in arguments_in(signature)
    ]
    return document


# -- recipes ---------------------------------------------------------------------------------------


def _commented(line: YamlLine, column: int) -> str:
    """A line with its origin as a comment, which goes below it where both are wider than 80."""
    comment = f"# {line.origin}"
    padded = f"{line.text:<{column}}  {comment}"
    if len(padded) <= WIDTH:
        return padded
    indent = len(line.text) - len(line.text.lstrip())
    beside = f"{line.text}  {comment}"
    return beside if len(beside) <= WIDTH else f"{line.text}\n{' ' * (indent + 2)}{comment}"


def _show_recipe(resolved: Resolved, origins: bool, every: bool, as_json: bool) -> None:
    from rlcli.recipe.introspection.readable import defaults_left_out, what_is_set
    from rlcli.recipe.parsing.write import to_yaml

    if as_json:
        document: dict[str, Any] = {
            "recipe": resolved.to_json(),
            "layers": [layer.file for layer in resolved.layers],
        }
        print_json(document | ({"origins": resolved.origins} if origins else {}))
        return
    recipe = resolved.to_json() if every else what_is_set(resolved)
    if origins:
        _print_with_origins(resolved, recipe)
    else:
        print_text(to_yaml(recipe).rstrip("\n"))
    if not every:
        print_talk(
            f"{defaults_left_out(resolved)} defaults are not shown: --all, or rlcli "
            "explain RECIPE SECTION"
        )


def _print_with_origins(resolved: Resolved, recipe: dict[str, Any]) -> None:
    """Print the layers, what they remove, and each value with its origin as a comment."""
    from rlcli.recipe.introspection.readable import COLUMN, by_label, with_origins

    for layer in resolved.layers:
        file = f"  {layer.file}" if layer.file != layer.label else ""
        print_text(f"# layer {layer.label}{file}")
    for key, mark in resolved.removed.items():
        print_text(f"# removed {key}  {by_label(str(mark), resolved)}")
    lines = with_origins(resolved, recipe)
    widths = [len(line.text) for line in lines if line.origin is not None]
    column = max((width for width in widths if width <= COLUMN), default=COLUMN)
    for line in lines:
        print_text(_commented(line, column) if line.origin else line.text)
