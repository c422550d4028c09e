"""Other frameworks' words for the arguments of the interfaces that a recipe names; each interface declares its own."""

from __future__ import annotations

from rlcli.recipe.components import declared
from rlcli.recipe.merge import whole_reference
from rlcli.recipe.tree import Mapping, Node, Path, Scalar, at, dotted

GRAPHS: tuple[Path, ...] = (("graph",), ("train", "eval", "graph"))


def argument_words(written: Node | None) -> dict[str, str]:
    """Word elsewhere → the key here, by the `SYNONYMS` of the interfaces in a recipe whose references are as written:
    in the block that a call takes its arguments from, or among the call's own."""
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
    """Argument of an interface → its names elsewhere."""
    named = isinstance(kind, Scalar) and isinstance(kind.value, str)
    found = declared("interfaces", kind.value, "SYNONYMS") if named else None  # type: ignore[union-attr, arg-type]
    return {str(argument): str(words) for argument, words in found.items()} if isinstance(found, dict) else {}


def _home(arguments: Node | None, path: Path) -> str:
    """Where a call's arguments are written: a block that they refer to, whole, or the call itself."""
    below = arguments.under if isinstance(arguments, Mapping) else arguments
    return whole_reference(below) or dotted(path)
