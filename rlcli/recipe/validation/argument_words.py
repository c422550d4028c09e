"""Other frameworks' names for arguments of the interfaces in a recipe; each interface declares its own."""

from __future__ import annotations

from rlcli.recipe.components import declared
from rlcli.recipe.parsing.merge import reference_below
from rlcli.recipe.parsing.places import GRAPHS
from rlcli.recipe.parsing.tree import Node, Scalar, at, dotted, keys_at


def argument_words(written: Node) -> dict[str, str]:
    """Foreign word → rlcli key, from the `SYNONYMS` of the interfaces in a recipe with unresolved references: in
    the block that a call takes its arguments from, or among the call's own."""
    words: dict[str, str] = {}
    for graph in GRAPHS:
        for name in keys_at(written, graph):
            interface = (*graph, name, "interface")
            kind, arguments = at(written, (*interface, "type")), at(written, (*interface, "args"))
            home = reference_below(arguments) or dotted((*interface, "args"))
            for argument, elsewhere in _synonyms(kind).items():
                words |= {word: f"{home}.{argument}" for word in elsewhere.split() if word not in words}
    return words


def _synonyms(kind: Node | None) -> dict[str, str]:
    """Argument of an interface → its names in other frameworks."""
    synonyms = declared("interfaces", str(kind.value), "SYNONYMS") if isinstance(kind, Scalar) else None
    return {str(argument): str(words) for argument, words in synonyms.items()} if isinstance(synonyms, dict) else {}
