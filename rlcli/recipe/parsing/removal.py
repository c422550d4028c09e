"""What `null` removes, when a layer or the command line sets it.

A role, a dataset, a call or any other entry under a user-defined name is removed; an optional key
gets its default back, as if no layer set it. Where null is allowed (`models.actor.tokenizer`), it
is the key's value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import NoneType
from typing import Any, Literal

from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import (
    COMMAND_LINE,
    Entry,
    KeyPath,
    MappingNode,
    Mark,
    Node,
    Scalar,
    at,
    dotted,
    entries_at,
    is_null,
)
from rlcli.recipe.schema import Recipe
from rlcli.recipe.schema_types import annotation_at, field_at, inside, options
from rlcli.spelling import name_instead

Meaning = Literal["value", "default", "gone"]


def null_means(model: Any, path: KeyPath) -> Meaning:
    """The meaning of null at a path of a model: a value (an invalid one, if the key is required or
    unknown), the key's default, or the removal of an entry."""
    holder = annotation_at(model, path[:-1])
    annotation, field = inside(holder, path[-1]), field_at(holder, path[-1])
    if annotation is None or any(option in (Any, None, NoneType) for option in options(annotation)):
        return "value"
    if field is None:
        return "gone" if isinstance(path[-1], str) else "value"
    return "value" if field.is_required() else "default"


def is_entry(path: KeyPath) -> bool:
    """Whether a path is that of a role, a dataset, a call or a block."""
    return null_means(Recipe, path) == "gone" or (
        len(path) == 1 and inside(Recipe, path[0]) is None
    )


def without_removed(
    model: Any, tree: MappingNode, problems: Problems, prefix: KeyPath = (), above: KeyPath = ()
) -> MappingNode:
    """The tree without what null removes. `prefix` is the path of the model in the recipe, `above`
    that of the tree in the model. A name that no layer below has is reported:
    it was probably misspelt."""
    entries: dict[str, Entry] = {}
    for key, entry in tree.entries.items():
        node, path = entry.node, (*above, key)
        if isinstance(node, MappingNode):
            entries[key] = Entry(entry.key, without_removed(model, node, problems, prefix, path))
        elif not is_null(node) or _is_value(model, path, node):
            entries[key] = entry
        elif node.over is None and null_means(model, path) == "gone":
            others = [name for name in tree.entries if name != key]
            hint = name_instead(key, others)
            message = f"null removes {dotted((*prefix, *path))}, which no layer below has"
            problems.add("R42", message, entry.key, hint, width=len(key), same=key)
    return replace(tree, entries=entries)


def _is_value(model: Any, path: KeyPath, null: Scalar) -> bool:
    """Whether a null is the value of a key, and not what removes a block of the layers below."""
    is_unknown = len(path) == 1 and inside(model, path[0]) is None
    removes_block = is_unknown and null.over is not None
    return null_means(model, path) == "value" and not removes_block


def removed_at(written: Node, path: KeyPath) -> Mark | None:
    """Where an entry is removed; `written`: all layers, merged."""
    node = at(written, path)
    return node.mark if is_null(node) and node.over is not None else None


def removed_calls(written: Node, graph: KeyPath) -> Iterator[tuple[str, MappingNode, Mark]]:
    """The calls that null removes from a graph: name, what the layers below say about it, where."""
    for name, entry in entries_at(written, graph).items():
        if isinstance(entry.node, Scalar) and isinstance(entry.node.over, MappingNode):
            yield name, entry.node.over, entry.node.mark


def place_of(mark: Mark) -> str:
    """`on the command line`, or `at recipes/mine.yaml:3:8`."""
    return f"on the {COMMAND_LINE}" if mark.file == COMMAND_LINE else f"at {mark}"
