"""Other frameworks' names for arguments of the interfaces in a recipe;
each interface declares its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlcli.recipe.components import declared_mapping, has_argument
from rlcli.recipe.parsing.merge import reference_below
from rlcli.recipe.parsing.places import GRAPHS
from rlcli.recipe.parsing.tree import KeyPath, Node, Scalar, at, dotted, keys_at, value_at


def argument_words(written: Node) -> dict[str, str]:
    """Foreign word → rlcli key, from the `SYNONYMS` of the interfaces in a recipe with unresolved
    references: in the block that a call takes its arguments from, or among the call's own."""
    words: dict[str, str] = {}
    for kind, home in _interfaces(written):
        for argument, elsewhere in declared_mapping("interfaces", kind, "SYNONYMS").items():
            for word in str(elsewhere).split():
                words.setdefault(word, f"{home}.{argument}")
    return words


def key_as_argument(written: Node, section: KeyPath, key: str) -> str | None:
    """The key of an argument that was written one level too high, in the section of a component or
    of the role or call that has it; None if the component has no such argument."""
    for inner in ((), ("backend",), ("interface",)):
        home = (*section, *inner)
        is_dataset = len(home) == 2 and home[0] == "datasets"
        kind = "datasets" if is_dataset else _KINDS.get(home[-1]) if home else None
        name = value_at(written, (*home, "type"))
        if kind is None or not isinstance(name, str):
            continue
        if has_argument(kind, name, key):
            return dotted((*home, "args", key))
    return None


_KINDS: Mapping[str | int, str] = {"backend": "backends", "interface": "interfaces"}


def argument_homes(written: Node, argument: str) -> list[str]:
    """The keys under which interfaces in the recipe take an argument of that name."""
    homes = [
        home for kind, home in _interfaces(written) if has_argument("interfaces", kind, argument)
    ]
    return [f"{home}.{argument}" for home in dict.fromkeys(homes)]


def advice_on(written: Node, argument: str) -> str | None:
    """What an interface in the recipe declares about an argument that it had in an older format."""
    advice = [declared_mapping("interfaces", kind, "CHANGED") for kind, _ in _interfaces(written)]
    return next((changed[argument] for changed in advice if argument in changed), None)


def _interfaces(written: Node) -> Iterator[tuple[str, str]]:
    """The interface of each call, and the key of its arguments: a block, or the call's own."""
    for graph in GRAPHS:
        for name in keys_at(written, graph):
            interface = (*graph, name, "interface")
            kind, arguments = at(written, (*interface, "type")), at(written, (*interface, "args"))
            if isinstance(kind, Scalar):
                yield str(kind.value), reference_below(arguments) or dotted((*interface, "args"))
