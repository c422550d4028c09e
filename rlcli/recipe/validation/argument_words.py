"""Other frameworks' names for arguments of the interfaces in a recipe; each interface declares its own."""

from __future__ import annotations

from rlcli.recipe.components import declared
from rlcli.recipe.parsing.merge import whole_reference
from rlcli.recipe.parsing.tree import Mapping, Node, Path, Scalar, at, dotted

GRAPHS: tuple[Path, ...] = (("graph",), ("train", "eval", "graph"))


def argument_words(written: Node | None) -> dict[str, str]:
    """Foreign word → rlcli key, from the `SYNONYMS` of the interfaces in a recipe with unresolved references: in
    the block that a call takes its arguments from, or among the call's own."""
    words: dict[str, str] = {}
    for graph in GRAPHS:
        calls = at(written, graph) if written is not None else None
        if not isinstance(calls, Mapping):
            continue
        for name in calls.entries:
            kind, arguments = (at(calls, (name, "interface", key)) for key in ("type", "args"))
            home = _home(arguments, (*graph, name, "interface", "args"))
            for argument, elsewhere in _synonyms(kind).items():
                words |= {word: f"{home}.{argument}" for word in elsewhere.split() if word not in words}
    return words


def _synonyms(kind: Node | None) -> dict[str, str]:
    """Argument of an interface → its names in other frameworks."""
    named = isinstance(kind, Scalar) and isinstance(kind.value, str)
    found = declared("interfaces", kind.value, "SYNONYMS") if named else None  # type: ignore[union-attr, arg-type]
    return {str(argument): str(words) for argument, words in found.items()} if isinstance(found, dict) else {}


def _home(arguments: Node | None, path: Path) -> str:
    """Where a call's arguments are written: in a block they refer to as a whole, or in the call itself."""
    below = arguments.under if isinstance(arguments, Mapping) else arguments
    return whole_reference(below) or dotted(path)
