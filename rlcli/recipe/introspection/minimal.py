"""Redundant values of a recipe: those that its parents, or the defaults, already set."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlcli.errors import DataError, ModelError, RecipeError
from rlcli.recipe.parsing.interpolation import references_in
from rlcli.recipe.parsing.layers import Layer
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import KeyPath, Mark, dotted, is_within, key_mark, nodes, without
from rlcli.recipe.resolve import Resolved, resolve_layers


@dataclass(frozen=True)
class Superfluous:
    """A key whose removal leaves the recipe unchanged."""

    key: str
    mark: Mark


def superfluous(resolved: Resolved, layer: Layer) -> list[Superfluous]:
    """The redundant keys of `layer`, one of the recipe's. Keys set by a command-line override are
    not judged, nor references, which take whatever others set there."""
    expected = resolved.to_json()
    overridden = [tuple(override.partition("=")[0].split(".")) for override in resolved.overrides]
    redundant: dict[KeyPath, Superfluous] = {}
    for path, node in nodes(layer.tree):
        is_overridden = any(is_within(key, path) for key in overridden)
        if not path or is_overridden or any(references_in(node)):
            continue
        if any(is_within(path, section) for section in redundant):
            continue
        shorter = without(layer.tree, path)
        if _comes_to(resolved, layer, replace(layer, tree=shorter)) == expected:
            redundant[path] = Superfluous(dotted(path), key_mark(layer.tree, path) or node.mark)
    return list(redundant.values())


def _comes_to(resolved: Resolved, layer: Layer, changed: Layer) -> object:
    """The result of the recipe with one layer replaced; None if it is then invalid."""
    layers = [changed if unchanged is layer else unchanged for unchanged in resolved.layers]
    try:
        result = resolve_layers(
            resolved.path, layers, resolved.overrides, resolved.profiles, Problems()
        )
    except (RecipeError, DataError, ModelError):
        return None
    return result.to_json()
