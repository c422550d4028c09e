"""Defaults of schema keys that no layer sets."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rlcli.recipe.parsing.merge import APPEND
from rlcli.recipe.parsing.tree import (
    Entry,
    Listing,
    MappingNode,
    Node,
    at,
    default_mark,
    is_null,
    node_of,
    nodes,
    with_entry,
)
from rlcli.recipe.schema import Recipe
from rlcli.recipe.schema_types import annotation_at, field_at


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


def with_lists_to_extend(lower: Node, upper: MappingNode) -> Node:
    """The layers below, in which the lists that `upper` appends to have their defaults, unless one
    of these layers sets them."""
    for path, node in nodes(upper):
        below = at(lower, path)
        is_appended = isinstance(node, MappingNode) and APPEND in node.entries
        if is_appended and (below is None or is_null(below)):
            default = default_at(tuple(map(str, path)), len(path) - 1)
            if isinstance(default, Listing):
                lower = with_entry(lower, path, Entry(node.mark, default))
    return lower
