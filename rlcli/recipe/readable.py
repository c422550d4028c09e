"""A resolved recipe as YAML to read: only what layers set, or all of it, each value with the place it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcli.recipe.fields import completed, plain_leaves
from rlcli.recipe.resolve import Resolved
from rlcli.recipe.tree import DEFAULT, Mapping, Node, Scalar, dotted
from rlcli.recipe.write import to_yaml

COLUMN = 48
"""Where the origins begin at most, so that they end before column 80 in most recipes; longer lists are broken."""


@dataclass(frozen=True)
class Line:
    """One line of YAML, and where its value comes from; None for a line that only opens a section."""

    text: str
    origin: str | None


def what_is_set(resolved: Resolved) -> dict[str, Any]:
    """The recipe without the defaults that nobody set; as a recipe of one layer it loads to the same."""
    found = _set_only(resolved.tree, resolved.to_json())
    assert isinstance(found, dict)
    return found


def defaults_left_out(resolved: Resolved) -> int:
    """How many values `what_is_set` does without, arguments of components included."""
    every = sum(1 for _ in plain_leaves(completed(resolved.to_json())))
    return every - sum(1 for _ in plain_leaves(what_is_set(resolved)))


def with_origins(resolved: Resolved, document: dict[str, Any]) -> list[Line]:
    """The recipe as lines of YAML, each value with its origin."""
    return [
        replace(line, origin=line.origin and by_label(line.origin, resolved)) for line in _lines(document, (), resolved)
    ]


def by_label(text: str, resolved: Resolved) -> str:
    """Text with the layers that lie elsewhere called by their labels: `base/ppo.yaml:3:1` without its long folder."""
    for layer in resolved.layers:
        if Path(layer.file).is_absolute():
            text = text.replace(f"{layer.file}:", f"{layer.label}:")
    return text


def _set_only(node: Node, value: Any) -> Any:
    """The part of the resolved value that the tree holds; what lies below an empty mapping is all default."""
    if isinstance(node, Mapping) and isinstance(value, dict):
        return {
            key: _set_only(node.entries[key].node, item)
            for key, item in value.items()
            if key in node.entries and not _is_empty_default(node.entries[key].node)
        }
    return value


def _is_empty_default(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value is None and node.mark.is_default


def _lines(value: dict[str, Any], path: tuple[str, ...], resolved: Resolved) -> Iterator[Line]:
    indent = "  " * len(path)
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield Line(indent + to_yaml({key: {}}).removesuffix(" {}\n"), None)
            yield from _lines(item, (*path, key), resolved)
            continue
        first, *rest = (indent + line for line in to_yaml({key: item}, room=COLUMN - len(indent)).splitlines())
        yield Line(first, resolved.origins.get(dotted((*path, key)), DEFAULT))
        yield from (Line(line, None) for line in rest)
