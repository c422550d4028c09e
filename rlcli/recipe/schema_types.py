"""Navigates the types of the schema's fields, from section to section."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def options(annotation: Any) -> Iterator[Any]:
    """The members of a union; any other type is its own only member."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from options(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from options(member)
    else:
        yield annotation


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a type is, or may be; None for a plain value, a list,
    or sections by name."""
    return next(
        (o for o in options(annotation) if isinstance(o, type) and issubclass(o, BaseModel)), None
    )


def fields_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a section. A component's argument is stored under another name,
    with its own as the alias."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def named_section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that each entry is, of a type such as `dict[str, Role]`."""
    return section_of(inside(annotation, "*")) if section_of(annotation) is None else None


def field_at(annotation: Any, key: str | int) -> FieldInfo | None:
    """The field of a section at a key."""
    section = section_of(annotation)
    return fields_of(section).get(str(key)) if section is not None else None


def inside(annotation: Any, key: str | int) -> Any:
    """The type of a section's field, a dict's value or a list's item; None if there is none."""
    if (field := field_at(annotation, key)) is not None:
        return field.annotation
    for option in options(annotation):
        inner = get_args(option)
        if get_origin(option) is dict and isinstance(key, str):
            return inner[1]
        if get_origin(option) in (list, tuple) and isinstance(key, int):
            return inner[0]
    return None


def annotation_at(annotation: Any, path: tuple[str | int, ...]) -> Any:
    """The type at the end of a path; None if the path does not exist."""
    for key in path:
        annotation = inside(annotation, key)
    return annotation


def stand_in(annotation: Any) -> Any:
    """A plain value for a required field whose written value cannot be used."""
    for option in options(annotation):
        origin = get_origin(option)
        if origin is Literal:
            return get_args(option)[0]
        if origin in (list, tuple):
            return []
        if origin is dict or section_of(option) is not None:
            return {}
        if option in (int, float, bool):
            return option(1)
    return "x"
