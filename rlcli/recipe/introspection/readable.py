"""A resolved recipe as readable YAML: only values set by layers, or all of them,
each with its origin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.recipe.introspection.fields import completed
from rlcli.recipe.parsing.tree import DEFAULT, MappingNode, Node, dotted, is_null, plain_leaves
from rlcli.recipe.parsing.write import to_yaml
from rlcli.recipe.resolve import Resolved

COLUMN = 48
"""Rightmost column where origins begin, so that they end before column 80 in most recipes;
longer lists wrap."""


@dataclass(frozen=True)
class YamlLine:
    """One line of YAML, and the origin of its value; None for a line that only opens a section."""

    text: str
    origin: str | None


def what_is_set(resolved: Resolved) -> dict[str, Any]:
    """The recipe without unset defaults; as a recipe of one layer it loads to the same."""
    settings = _set_only(resolved.tree, resolved.to_json())
    assert isinstance(settings, dict)
    return settings


def defaults_left_out(resolved: Resolved) -> int:
    """Number of values that `what_is_set` omits, including component arguments."""
    every = sum(1 for _ in plain_leaves(completed(resolved.to_json())))
    return every - sum(1 for _ in plain_leaves(what_is_set(resolved)))


def with_origins(
    resolved: Resolved, document: dict[str, Any], path: tuple[str, ...] = ()
) -> list[YamlLine]:
    """The recipe, or its section at a path, as lines of YAML, each value with its origin."""
    indent = "  " * len(path)
    lines: list[YamlLine] = []
    for key, item in document.items():
        if isinstance(item, dict) and item:
            lines.append(YamlLine(indent + to_yaml({key: {}}).removesuffix(" {}\n"), None))
            lines += with_origins(resolved, item, (*path, key))
            continue
        first, *rest = (
            indent + line for line in to_yaml({key: item}, room=COLUMN - len(indent)).splitlines()
        )
        lines.append(
            YamlLine(first, by_label(resolved.origins.get(dotted((*path, key)), DEFAULT), resolved))
        )
        lines += [YamlLine(line, None) for line in rest]
    return lines


def by_label(text: str, resolved: Resolved) -> str:
    """Text with layers from other folders under their labels:
    `base/ppo.yaml:3:1` without the long folder."""
    for layer in resolved.layers:
        if Path(layer.file).is_absolute():
            text = text.replace(f"{layer.file}:", f"{layer.label}:")
    return text


def _set_only(node: Node, value: Any) -> Any:
    """The part of the resolved value that the tree contains;
    everything below an empty mapping is default."""
    if isinstance(node, MappingNode) and isinstance(value, dict):
        return {
            key: _set_only(node.entries[key].node, item)
            for key, item in value.items()
            if key in node.entries and not _is_empty_default(node.entries[key].node)
        }
    return value


def _is_empty_default(node: Node) -> bool:
    return is_null(node) and node.mark.is_default
