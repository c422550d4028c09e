"""What is known about a key before any layer sets it: type, documentation, default,
and where that is written."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from rlcli.errors import ProjectError
from rlcli.project import roots
from rlcli.recipe.components import known_signature
from rlcli.recipe.introspection.docs import doc_of
from rlcli.recipe.parsing.finding import shown
from rlcli.recipe.parsing.places import component_paths
from rlcli.recipe.parsing.tree import KeyPath, Node, Scalar, at, default_mark, dotted, node_of
from rlcli.recipe.schema import Call, Component, Recipe
from rlcli.recipe.schema_types import (
    annotation_at,
    field_at,
    fields_of,
    inside,
    named_section_of,
    section_of,
)
from rlcli.recipe.suggest import PLACEHOLDERS
from rlcli.registry import COMPUTED, Argument, Signature


@dataclass(frozen=True)
class Field:
    """A schema key, or an argument of a component."""

    type: str
    doc: str
    required: bool
    default_text: str | None
    """As written in a recipe; None if `required`."""
    location: str | None = None
    """`file:line` of a component's argument."""


def field_of(path: KeyPath, tree: Node) -> Field | None:
    """The field behind a key of a recipe; None for a free-form key, or one that does not exist."""
    for path_of_component, signature in components_in(tree):
        for name, argument in arguments_in(signature):
            if path == (*path_of_component, "args", *name.split(".")):
                return _argument_field(signature, argument)
    return _section_field(path)


def fields_under(name: str) -> list[tuple[str, Field]]:
    """The keys of a schema section, nested sections included, or the single key of that name and,
    if it is a list of sections, theirs; none if there is no such section. `<role>` stands for a
    user-defined name."""
    path = tuple(name.split("."))
    annotation, own_field = annotation_at(Recipe, path), _section_field(path)
    below = list(_fields_in(annotation, path))
    if own_field is None or below:
        return below
    return [(name, own_field), *_fields_in(inside(annotation, 0), (*path[:-1], f"{path[-1]}[]"))]


def _fields_in(annotation: Any, path: KeyPath) -> Iterator[tuple[str, Field]]:
    section = section_of(annotation)
    if named_section_of(annotation) not in (None, Component):
        yield from _fields_in(
            inside(annotation, "*"), (*path, PLACEHOLDERS.get(str(path[-1]), "<name>"))
        )
    elif section is not None and section is not Component:
        for key, info in fields_of(section).items():
            if (
                deeper := list(_fields_in(info.annotation, (*path, key)))
                if section_of(info.annotation)
                else []
            ):
                yield from deeper
            else:
                yield dotted((*path, key)), _described(section, key, info)


def components_in(tree: Node) -> Iterator[tuple[KeyPath, Signature]]:
    """Every component that a recipe names, with the path of its section."""
    for path, kind in component_paths(tree):
        name = at(tree, (*path, "type"))
        signature = known_signature(kind, str(name.value)) if isinstance(name, Scalar) else None
        if signature is not None:
            yield path, signature


def completed(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe as plain values, with the defaults of all component arguments."""
    result: Any = copy.deepcopy(recipe)
    for path, signature in components_in(node_of(recipe, default_mark())):
        section = reduce(getitem, path, result)
        args = section.get("args") or {}
        if isinstance(args, dict):  # not so in a recipe that was not checked
            section["args"] = _with_defaults(signature.arguments, args)
    return result


def _with_defaults(arguments: tuple[Argument, ...], values: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for argument in arguments:
        value = values.get(argument.name)
        if argument.name in values:
            inside = argument.fields and isinstance(value, dict)
            result[argument.name] = (
                _with_defaults(argument.fields, value or {}) if inside else value
            )
        elif argument.presets is not None:
            result[argument.name] = _with_defaults(argument.fields, {})
        elif not argument.required:
            computed = argument.default is COMPUTED
            result[argument.name] = (
                f"<{argument.default_text}>" if computed else _as_json(argument.default)
            )
    return result | {name: value for name, value in values.items() if name not in result}


def _as_json(value: Any) -> Any:
    return (
        [_as_json(item) for item in value]
        if isinstance(value, list | tuple | set | frozenset)
        else value
    )


def arguments_in(signature: Signature) -> Iterator[tuple[str, Argument]]:
    """A component's arguments by dotted name, nested ones after the one that contains them."""
    yield from _arguments(signature.arguments, "")


def _arguments(arguments: tuple[Argument, ...], prefix: str) -> Iterator[tuple[str, Argument]]:
    for argument in arguments:
        yield prefix + argument.name, argument
        yield from _arguments(argument.fields, f"{prefix}{argument.name}.")


def default_text(argument: Argument) -> str:
    """An argument's default in recipe syntax, or as in its source."""
    if argument.default is COMPUTED:
        return argument.default_text or "computed"
    return yaml_word(argument.default)


def yaml_word(value: Any) -> str:
    """A plain value as YAML, on one line."""
    from rlcli.recipe.parsing.write import to_yaml

    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{key}: {yaml_word(item)}" for key, item in value.items()) + "}"
    return to_yaml({"v": value}, room=sys.maxsize).removeprefix("v: ").rstrip("\n")


def argument_type(signature: Signature, argument: Argument) -> str:
    """The type in words, with bounds or choices; as in the source if recipes have no words for
    it."""
    from rlcli.registry.arguments import type_of_argument

    try:
        bounds = signature.limits.get(argument.name, {}) if argument in signature.arguments else {}
        return type_text(type_of_argument(argument), [SimpleNamespace(**bounds)])
    except (ProjectError, _Wordless):
        return argument.annotation


def _argument_field(signature: Signature, argument: Argument) -> Field:
    return Field(
        type=argument_type(signature, argument),
        doc=" ".join(argument.doc.split()),
        required=argument.required,
        default_text=None if argument.required else default_text(argument),
        location=f"{_short(argument.path)}:{argument.line}",
    )


def _short(path: Path) -> str:
    """A component's file: relative to the working directory,
    otherwise to the folder of its kind."""
    homes = [root for root in roots() if path.is_relative_to(root)]
    return (
        shown(path)
        if path.is_relative_to(Path.cwd()) or not homes
        else path.relative_to(homes[-1]).as_posix()
    )


def _section_field(path: KeyPath) -> Field | None:
    section = section_of(annotation_at(Recipe, path[:-1]))
    field = field_at(section, path[-1])  # None for a user-defined name: models.<role>
    return (
        _described(section, str(path[-1]), field)
        if field is not None and section is not None
        else None
    )


def _described(section: type[BaseModel], key: str, field: FieldInfo) -> Field:
    default = field.get_default(call_default_factory=True) if not field.is_required() else None
    plain = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    text = None if field.is_required() else yaml_word(plain)
    if section is Call and key in ("inputs", "outputs"):
        text = "as its interface declares"
    return Field(
        type=type_text(field.annotation, field.metadata),
        doc=doc_of(section, key),
        required=field.is_required(),
        default_text=text,
    )


_WORDS: dict[Any, str] = {
    str: "text",
    Path: "text",
    int: "int",
    float: "float",
    bool: "bool",
    Any: "anything",
}
_WORDS |= {type(None): "null", None: "null"}
_LISTS = (list, tuple, set, frozenset)
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class _Wordless(Exception):
    """A type that cannot be described in words."""


def type_text(annotation: Any, metadata: Any = ()) -> str:
    """A field's type in words: `int >= 1`, `text | null`, `lm | value`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        details = list(_details(inner[1:]))
        is_converted = any(isinstance(detail, BeforeValidator) for detail in details)
        if is_converted and inner[0] is Any:
            raise _Wordless
        return type_text(inner[0], [*metadata, *details])
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(member, metadata) for member in inner)
    if origin in _LISTS:
        return f"list of {type_text(inner[0])}"
    if origin is dict or section_of(annotation) is not None:
        return "section"
    if annotation not in _WORDS:
        raise _Wordless
    words = [_WORDS[annotation]]
    if annotation in (int, float):
        words += _bounds(metadata)
    return " ".join(words)


def _details(metadata: Iterable[Any]) -> Iterator[Any]:
    """What is annotated, also within the fields of pydantic."""
    for detail in metadata:
        if isinstance(detail, FieldInfo):
            yield from detail.metadata
        else:
            yield detail


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    """`>= 1`."""
    for detail in metadata:
        for name, sign in _BOUNDS.items():
            if hasattr(detail, name):
                yield f"{sign} {getattr(detail, name)}"
