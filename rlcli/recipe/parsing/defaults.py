"""Defaults of schema keys that no layer sets."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rlcli.recipe.annotations import annotation_at, field_at
from rlcli.recipe.parsing.tree import Node, default_mark, node_of
from rlcli.recipe.schema import Recipe


def default_at(path: tuple[str, ...], walked: int) -> Node | None:
    """The default at a path whose first `walked` keys some layer sets. None if the schema has none:
    for unknown keys, required ones, and below a user-defined name (`models.<role>`)
    that does not exist.

    A section is empty: a section that references it gets the same defaults for its keys.
    """
    default: Any = None
    for depth in range(walked, len(path)):
        field = field_at(annotation_at(Recipe, path[:depth]), path[depth])
        if field is None or field.is_required():
            return None
        default = field.get_default(call_default_factory=True)
    return node_of({} if isinstance(default, BaseModel) else default, default_mark())
