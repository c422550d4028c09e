"""Defaults of schema keys that no layer sets."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rlcli.recipe.annotations import field_at, inside
from rlcli.recipe.parsing.tree import Node, default_mark, node_of
from rlcli.recipe.schema import Recipe


def default_at(path: tuple[str, ...], walked: int) -> Node | None:
    """The default at a path whose first `walked` keys some layer sets. None if the schema has none: for unknown keys,
    required ones, and below a user-defined name (`models.<role>`) that does not exist.

    A section is empty: a section that references it gets the same defaults for its keys.
    """
    annotation: Any = Recipe
    default: Any = None
    for depth, part in enumerate(path):
        field = field_at(annotation, part)
        if field is None and depth >= walked:
            return None
        if field is not None:
            if field.is_required() and depth >= walked:
                return None
            default = None if field.is_required() else field.get_default(call_default_factory=True)
        annotation = inside(annotation, part)
        if annotation is None:
            return None
    return node_of({} if isinstance(default, BaseModel) else default, default_mark())
