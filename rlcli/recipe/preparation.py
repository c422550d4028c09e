"""Adds the calls that compute what training reads, where a graph has none.

An interface names in `PREPARED_BY` the one that prepares its batches. Recipes from before that was
a call of the graph give its arguments to the calls that train: they mean one call, with these
arguments, so those must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlcli.recipe.call_keys import made_by
from rlcli.recipe.components import argument_named, declared
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import (
    Entry,
    MappingNode,
    Node,
    at,
    default_mark,
    entries_at,
    node_of,
    plain,
    with_entry,
    with_value,
)

GRAPH = ("graph",)
ARGS = ("interface", "args")


def with_preparation(tree: MappingNode, problems: Problems) -> MappingNode:
    """The tree, with a call for each interface that prepares batches and is missing from the
    graph."""
    graph = at(tree, GRAPH) or MappingNode({}, tree.mark)
    for kind, prepared in missing_preparations(graph).items():
        assert isinstance(graph, MappingNode)
        holding = [
            name for name, entry in graph.entries.items() if kind in _preparing(entry.node).values()
        ]
        _check_agreement(kind, graph, holding, prepared, problems)
        call = _preparing_call(kind, graph, holding, prepared[0])
        renamed = _renamed_inputs(kind, graph, prepared)
        if renamed is not None:
            call = replace(call, node=with_entry(call.node, ("input_key_remap",), renamed))
        entries = {
            name: _without_moved(entry, kind, graph, holding)
            for name, entry in graph.entries.items()
        }
        entries |= {name: _with_inputs_of_today(entries[name]) for name in prepared}
        graph = replace(
            graph, entries=_inserted(entries, _free_name(kind, graph), call, before=prepared[0])
        )
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
    method = at(call, ("call",))
    return _preparing(call).get(str(plain(method))) if method is not None else None


def _preparing(call: Node) -> dict[str, str]:
    """Method of a call's interface → the interface that prepares its batches."""
    declaration = declared("interfaces", _interface(call), "PREPARED_BY")
    return declaration if isinstance(declaration, dict) else {}


def _interface(call: Node) -> str:
    kind = at(call, ("interface", "type"))
    return str(plain(kind)) if kind is not None else ""


def always_written(kind: str) -> set[str]:
    """The keys that an interface writes with any arguments."""
    declaration = declared("interfaces", kind, "WRITES") or {}
    return {entry for entries in declaration.values() for entry in entries if " " not in entry}


def read_by(kind: str) -> set[str]:
    """The keys that an interface reads with some arguments."""
    declaration = declared("interfaces", kind, "READS") or {}
    return {str(entry).partition(" ")[0] for entries in declaration.values() for entry in entries}


def _preparing_call(kind: str, graph: MappingNode, holding: list[str], first: str) -> Entry:
    """A call of the role of the first that needs it, with the arguments that calls hold for it."""
    mark = default_mark(f"PREPARED_BY of {_interface(graph.entries[first].node)}")
    arguments: dict[str, Entry] = {}
    for name in holding:
        arguments = {**_args(graph.entries[name].node), **arguments}
    taken = {
        key: entry
        for key, entry in arguments.items()
        if argument_named("interfaces", kind, key) is not None
    }
    role = at(graph.entries[first].node, ("model",)) or node_of(None, mark)
    interface = {
        "type": Entry(mark, node_of(kind, mark)),
        "args": Entry(mark, MappingNode(taken, mark)),
    }
    call = {
        "model": Entry(mark, role),
        "call": Entry(mark, node_of("inference", mark)),
        "interface": Entry(mark, MappingNode(interface, mark)),
    }
    return Entry(graph.entries[first].key, MappingNode(call, mark))


def _renamed_inputs(kind: str, graph: MappingNode, prepared: list[str]) -> Entry | None:
    """The renames of the calls that train, as far as they concern what the new call reads now."""
    entries = {
        key: entry
        for name in prepared
        for key, entry in entries_at(graph, (name, "input_key_remap")).items()
        if plain(entry.node) in read_by(kind)
    }
    return Entry(default_mark(), MappingNode(entries, default_mark())) if entries else None


def _without_moved(entry: Entry, kind: str, graph: MappingNode, holding: list[str]) -> Entry:
    """A call without the arguments that are now those of the call that prepares its batches, and
    without those that it only had because other calls have them."""
    call, args = entry.node, at(entry.node, ARGS)
    interface = _interface(call)
    holders = {_interface(graph.entries[name].node) for name in holding}
    if (
        not isinstance(call, MappingNode)
        or not isinstance(args, MappingNode)
        or interface not in holders
    ):
        return entry
    remaining = {
        key: value
        for key, value in args.entries.items()
        if argument_named("interfaces", interface, key) is not None
        or all(argument_named("interfaces", taker, key) is None for taker in {kind, *holders})
    }
    shorter = with_value(call, ARGS, replace(args, entries=remaining))
    return replace(entry, node=shorter)


def _with_inputs_of_today(entry: Entry) -> Entry:
    """A call that lists no inputs, and renames none that its interface does not read: it listed
    what it read before."""
    node = entry.node
    assert isinstance(node, MappingNode)
    entries = {key: value for key, value in node.entries.items() if key != "inputs"}
    remap = entries.get("input_key_remap")
    if remap is not None and isinstance(remap.node, MappingNode):
        names = read_by(_interface(node))
        remaining = {
            key: value for key, value in remap.node.entries.items() if plain(value.node) in names
        }
        entries["input_key_remap"] = replace(remap, node=replace(remap.node, entries=remaining))
    return replace(entry, node=replace(node, entries=entries))


def _args(call: Node) -> dict[str, Entry]:
    return entries_at(call, ARGS)


def _check_agreement(
    kind: str, graph: MappingNode, holding: list[str], prepared: list[str], problems: Problems
) -> None:
    """Report arguments that calls hold with different values, though what they decide is computed
    once. A call that trains means the default of what it does not set."""
    calls = {name: graph.entries[name].node for name in holding}
    arguments = dict.fromkeys(argument for call in calls.values() for argument in _args(call))
    for argument in arguments:
        signature = argument_named("interfaces", kind, argument)
        if signature is None:
            continue
        nodes = {name: at(call, (*ARGS, argument)) for name, call in calls.items()}
        marks = [node.mark for node in nodes.values() if node is not None]
        values: dict[str, tuple[Any, str]] = {}
        for name, node in nodes.items():
            if node is not None:
                values[name] = plain(node), str(node.mark)
            elif name in prepared:
                values[name] = signature.default, "the default"
        if problem := disagreement(argument, values):
            hint = f"set {argument} to the same value for all"
            problems.add("R71", problem, marks[-1], hint, same=argument)


def disagreement(argument: str, values: Mapping[str, tuple[Any, str]]) -> str | None:
    """What is wrong with an argument that calls must have with one value, if they do not. `values`:
    call → the value it has, and where that is written."""
    if len({repr(value) for value, _ in values.values()}) < 2:
        return None
    listed = [f"{value!r} in {call} ({where})" for call, (value, where) in values.items()]
    return f"{argument} is {' and '.join(listed)}, but the calls must agree on it"


def _free_name(kind: str, graph: MappingNode) -> str:
    """A name for the call: that of its interface, where no other call has it."""
    name = kind
    while name in graph.entries:
        name += "_"
    return name


def _inserted(entries: dict[str, Entry], name: str, entry: Entry, before: str) -> dict[str, Entry]:
    names = list(entries)
    position = names.index(before)
    ordered = [*names[:position], name, *names[position:]]
    return {key: entry if key == name else entries[key] for key in ordered}
