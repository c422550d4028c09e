"""Adds the calls that compute what training reads, where a graph has none.

An interface names in `PREPARED_BY` the one that prepares its batches. Recipes from before that was
a call of the graph give its arguments to the calls that train: they mean one call, with these
arguments, so those must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlcli.recipe.components import argument_named, declared_mapping, has_argument
from rlcli.recipe.expansion.call_keys import made_by
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import (
    Entry,
    MappingNode,
    Mark,
    Node,
    at,
    default_mark,
    entries_at,
    node_of,
    plain,
    value_at,
    with_entry,
    with_value,
)

GRAPH = ("graph",)
ARGS = ("interface", "args")
REMAP = "input_key_remap"


def with_preparation(tree: MappingNode, problems: Problems) -> MappingNode:
    """The tree, with a call for each interface that prepares batches and is missing from the
    graph."""
    graph = at(tree, GRAPH) or MappingNode({}, tree.mark)
    for kind, needing in missing_preparations(graph).items():
        assert isinstance(graph, MappingNode)
        missing_call = _PreparingCall(kind, graph, needing)
        missing_call.check_agreement(problems)
        graph = missing_call.inserted()
        tree = with_value(tree, GRAPH, graph)
    return tree


def missing_preparations(graph: Node) -> dict[str, list[str]]:
    """Interface that prepares batches, without a call that makes what it writes → the calls that
    need one."""
    calls = {name: entry.node for name, entry in entries_at(graph).items()}
    needing: dict[str, list[str]] = {}
    for name, call in calls.items():
        kind = prepared_by(call)
        if kind is not None:
            needing.setdefault(kind, []).append(name)
    produced = {key for call in calls.values() for key in made_by(call)}
    return {
        kind: names for kind, names in needing.items() if produced.isdisjoint(always_written(kind))
    }


def prepared_by(call: Node) -> str | None:
    """The interface that prepares the batches of a call; None if none does."""
    return _preparing(call).get(str(value_at(call, ("call",))))


def _preparing(call: Node) -> Mapping[str, str]:
    """Method of a call's interface → the interface that prepares its batches."""
    return declared_mapping("interfaces", _interface(call), "PREPARED_BY")


def _interface(call: Node) -> str:
    return str(value_at(call, ("interface", "type")) or "")


def always_written(kind: str) -> set[str]:
    """The keys that an interface writes with any arguments."""
    declaration = declared_mapping("interfaces", kind, "WRITES")
    return {entry for entries in declaration.values() for entry in entries if " " not in entry}


def read_by(kind: str) -> set[str]:
    """The keys that an interface reads with some arguments."""
    declaration = declared_mapping("interfaces", kind, "READS")
    return {str(entry).partition(" ")[0] for entries in declaration.values() for entry in entries}


@dataclass(frozen=True)
class _PreparingCall:
    """A call that prepares batches, which a graph lacks."""

    kind: str
    """Its interface."""
    graph: MappingNode
    needing: list[str]
    """The calls that need its batches."""

    @cached_property
    def holding(self) -> dict[str, Node]:
        """The calls that may have its arguments."""
        calls = {name: entry.node for name, entry in self.graph.entries.items()}
        return {
            name: call for name, call in calls.items() if self.kind in _preparing(call).values()
        }

    def check_agreement(self, problems: Problems) -> None:
        """Report arguments that calls hold with different values, though what they decide is
        computed once."""
        arguments = dict.fromkeys(
            argument for call in self.holding.values() for argument in entries_at(call, ARGS)
        )
        for argument in arguments:
            signature = argument_named("interfaces", self.kind, argument)
            if signature is not None:
                self._check_argument(argument, signature.default, problems)

    def _check_argument(self, argument: str, default: Any, problems: Problems) -> None:
        """A call that trains means the default of what it does not set."""
        values: dict[str, tuple[Any, str]] = {}
        marks: list[Mark] = []
        for name, call in self.holding.items():
            node = at(call, (*ARGS, argument))
            if node is not None:
                values[name] = plain(node), str(node.mark)
                marks.append(node.mark)
            elif name in self.needing:
                values[name] = default, "the default"
        if problem := disagreement(argument, values):
            hint = f"set {argument} to the same value for all"
            problems.add("R71", problem, marks[-1], hint, same=argument)

    def inserted(self) -> MappingNode:
        """The graph with the call before the first that needs it."""
        entries: dict[str, Entry] = {}
        for name, entry in self.graph.entries.items():
            if name == self.needing[0]:
                entries[self._free_name()] = self._call()
            node = self._without_moved(entry.node)
            entries[name] = replace(entry, node=_of_today(node) if name in self.needing else node)
        return replace(self.graph, entries=entries)

    def _free_name(self) -> str:
        """A name for the call: that of its interface, where no other call has it."""
        name = self.kind
        while name in self.graph.entries:
            name += "_"
        return name

    def _call(self) -> Entry:
        """A call of the role of the first that needs it, with the arguments that calls hold for
        it."""
        first = self.graph.entries[self.needing[0]]
        mark = default_mark(f"PREPARED_BY of {_interface(first.node)}")
        nodes = {
            ("model",): at(first.node, ("model",)) or node_of(None, mark),
            ("call",): node_of("inference", mark),
            ("interface", "type"): node_of(self.kind, mark),
            ARGS: MappingNode(self._arguments(), mark),
        }
        call = MappingNode({}, mark)
        for path, node in nodes.items():
            call = with_entry(call, path, Entry(mark, node))
        if renamed := self._renamed_inputs():
            renames = MappingNode(renamed, default_mark())
            call = with_entry(call, (REMAP,), Entry(renames.mark, renames))
        return Entry(first.key, call)

    def _arguments(self) -> dict[str, Entry]:
        """The arguments that calls hold for it; of several values that of the first call."""
        arguments: dict[str, Entry] = {}
        for call in self.holding.values():
            arguments = {**entries_at(call, ARGS), **arguments}
        return {
            key: entry
            for key, entry in arguments.items()
            if has_argument("interfaces", self.kind, key)
        }

    def _renamed_inputs(self) -> dict[str, Entry]:
        """The renames of the calls that need it, as far as they concern what it reads."""
        renames = [entries_at(self.graph, (name, REMAP)) for name in self.needing]
        return {
            key: entry
            for entries in renames
            for key, entry in entries.items()
            if plain(entry.node) in read_by(self.kind)
        }

    def _without_moved(self, call: Node) -> Node:
        """A call without the arguments that are now those of this one, and without those that it
        only had because other calls have them."""
        args, interface = at(call, ARGS), _interface(call)
        holders = set(map(_interface, self.holding.values()))
        if not isinstance(call, MappingNode) or not isinstance(args, MappingNode):
            return call
        if interface not in holders:
            return call
        foreign = [key for key in args.entries if not has_argument("interfaces", interface, key)]
        takers = (self.kind, *holders)
        moved = [
            key for key in foreign if any(has_argument("interfaces", kind, key) for kind in takers)
        ]
        return with_value(call, ARGS, args.without_keys(moved))


def _of_today(call: Node) -> Node:
    """A call that lists no inputs, and renames none that its interface does not read: it listed
    what it read before."""
    assert isinstance(call, MappingNode)
    call = call.without_keys(["inputs"])
    remap = call.get(REMAP)
    if not isinstance(remap, MappingNode):
        return call
    read = read_by(_interface(call))
    unread = [key for key, meaning in plain(remap).items() if meaning not in read]
    return with_value(call, (REMAP,), remap.without_keys(unread))


def disagreement(argument: str, values: Mapping[str, tuple[Any, str]]) -> str | None:
    """What is wrong with an argument that calls must have with one value, if they do not. `values`:
    call → the value it has, and where that is written."""
    if len({repr(value) for value, _ in values.values()}) < 2:
        return None
    listed = [f"{value!r} in {call} ({where})" for call, (value, where) in values.items()]
    return f"{argument} is {' and '.join(listed)}, but the calls must agree on it"
