"""What a recipe says in vain: values that its parents, or the defaults, say already."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlcli.errors import DataError, ModelError, RecipeError
from rlcli.recipe.layers import Layer
from rlcli.recipe.problems import Problems
from rlcli.recipe.resolve import Resolved, resolve_layers
from rlcli.recipe.tree import Mapping, Mark, Path, dotted, key_mark, nodes, with_value


@dataclass(frozen=True)
class Superfluous:
    """A key without which the recipe is the same."""

    key: str
    mark: Mark


def superfluous(resolved: Resolved, layer: Layer) -> list[Superfluous]:
    """What `layer`, one of the recipe's, says in vain. What a command-line override sets is not judged."""
    whole = resolved.to_json()
    overridden = [tuple(override.partition("=")[0].split(".")) for override in resolved.overrides]
    found: dict[Path, Superfluous] = {}
    for path, node in nodes(layer.tree):
        is_overridden = any(above[: len(path)] == path for above in overridden)
        if not path or is_overridden or any(path[: len(above)] == above for above in found):
            continue
        shorter = with_value(layer.tree, path, None)
        assert isinstance(shorter, Mapping)
        if _comes_to(resolved, layer, replace(layer, tree=shorter)) == whole:
            found[path] = Superfluous(dotted(path), key_mark(layer.tree, path) or node.mark)
    return list(found.values())


def _comes_to(resolved: Resolved, layer: Layer, changed: Layer) -> object:
    """What the recipe comes to with another layer in the place of `layer`; None if it does not hold then."""
    layers = [changed if one is layer else one for one in resolved.layers]
    try:
        other = resolve_layers(resolved.path, layers, resolved.overrides, resolved.profiles, Problems())
    except (RecipeError, DataError, ModelError):
        return None
    return other.to_json()
