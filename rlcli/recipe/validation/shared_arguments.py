"""Which components the arguments written at one place are meant for: several, if `${…}` passes them
on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from rlcli import registry
from rlcli.recipe.components import argument_names
from rlcli.recipe.parsing.interpolation import references_in
from rlcli.recipe.parsing.merge import reference_below
from rlcli.recipe.parsing.places import component_paths
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.removal import place_of, removed_calls
from rlcli.recipe.parsing.tree import (
    Entry,
    KeyPath,
    MappingNode,
    Mark,
    Node,
    Scalar,
    at,
    dotted,
    entries_at,
    value_at,
)
from rlcli.recipe.schema import SECTIONS


@dataclass
class Takers:
    """The components that receive the arguments written at one place: several,
    if `${…}` passes them on."""

    number: int = 0
    legal: dict[str, None] = field(default_factory=dict)
    """The union of their arguments."""
    chosen: list[tuple[Mark, str]] = field(default_factory=list)
    """Where each of them was chosen, and words for it."""
    is_received: bool = False
    """Whether one of them gets the value, and has such an argument."""
    replaced: dict[KeyPath, Mark] = field(default_factory=dict)
    """The arguments that other values are set for on top of it, and where."""

    def add(self, key: str, legal: tuple[str, ...] | None, chosen: list[tuple[Mark, str]]) -> bool:
        """Another component, with its arguments and where it was chosen. Returns whether it may
        have the argument."""
        self.number += 1
        self.legal |= dict.fromkeys(legal or ())
        self.chosen += chosen
        return legal is None or key in legal

    def note_on_top(self, path: KeyPath, entry: Entry) -> None:
        """An argument of a component on top of it. A mapping is merged with it."""
        if isinstance(entry.node, MappingNode):
            self.is_received = True
        else:
            self.replaced[path] = entry.key


def takers_by_mark(tree: MappingNode, problems: Problems) -> dict[Mark, Takers]:
    """The components that each argument is meant for, by the place where it is written."""
    takers_of: dict[Mark, Takers] = {}
    unknown: set[str] = set()
    for path, kind in component_paths(tree):
        name = at(tree, (*path, "type"))
        legal = argument_names(kind, str(getattr(name, "value", "")))
        unknown |= {kind} if legal is None else set()
        chosen = [_chosen(path, name, problems)] if isinstance(name, Scalar) else []
        _add_takers(takers_of, tree, (*path, "args"), legal, chosen, problems)
    meant = _arguments_of_all(unknown)
    for takers in takers_of.values():
        takers.legal |= meant if takers.number > 1 else {}
    return takers_of


def _chosen(path: KeyPath, name: Scalar, problems: Problems) -> tuple[Mark, str]:
    """Where it was decided which component a section names, and words that say so: where the name
    is written, or where null removes the call that trained a role without a backend of its own."""
    words = f"{dotted(path)} is {name.value}"
    if name.mark.is_default:
        for call, removed, mark in removed_calls(problems.written, ("graph",)):
            role, method = value_at(removed, ("model",)), value_at(removed, ("call",))
            if (role, method) == (path[1], "train_step"):
                return mark, f"{words} because the call {call} is removed {place_of(mark)}"
    return name.mark, words


def _add_takers(
    takers_of: dict[Mark, Takers],
    tree: MappingNode,
    args: KeyPath,
    legal: tuple[str, ...] | None,
    chosen: list[tuple[Mark, str]],
    problems: Problems,
) -> None:
    """Add a component at the places of the arguments that it gets, and of those of a block that it
    has others on top of."""
    for key, entry in entries_at(tree, args).items():
        takers = takers_of.setdefault(entry.key, Takers())
        takers.is_received |= takers.add(key, legal, chosen)
    for key, mark, entry in _on_top(problems.written, args):
        takers = takers_of.setdefault(mark, Takers())
        if takers.add(key, legal, chosen):
            takers.note_on_top((*args, key), entry)


def _on_top(written: Node, args: KeyPath) -> Iterator[tuple[str, Mark, Entry]]:
    """The arguments set on top of a block that has them too: key, its place in the block, entry."""
    block = (reference_below(at(written, args)) or "").split(".")
    in_block = entries_at(written, tuple(block))
    for key, entry in entries_at(written, args).items():
        if key in in_block:
            yield key, in_block[key].key, entry


def _arguments_of_all(kinds: Collection[str]) -> dict[str, None]:
    """The arguments of all components of these kinds."""
    components = [(kind, name) for kind in kinds for name in registry.names(kind)]
    return {
        argument: None for kind, name in components for argument in argument_names(kind, name) or ()
    }


def refuse_replaced(takers_of: Mapping[Mark, Takers], problems: Problems) -> None:
    """Refuse a key of a block that nothing gets, because layers below set the argument of each
    component on top of the block."""
    for mark, takers in takers_of.items():
        arguments = takers.replaced
        is_above = all(problems.is_below(argument, mark) for argument in arguments.values())
        if takers.is_received or not arguments or not is_above:
            continue
        name = problems.name_at(mark, of_key=True) or ""
        targets = {dotted(reference.target) for reference in references_in(problems.written)}
        if name.partition(".")[0] in SECTIONS or name in targets:
            continue
        first = next(iter(arguments))
        message = f"{name} has no effect: {dotted(first)} is set {place_of(arguments[first])}"
        hint = " ".join(f"{dotted(path)}=…" for path in arguments)
        problems.add("R71", message, mark, f"set that instead: {hint}")
