"""Adds the calls that compute what training reads, where a graph has none.

An interface names in `PREPARED_BY` the one that prepares its batches. Recipes from before that was
a call of the graph give its arguments to the calls that train: they mean one call, with these
arguments, so those must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlcli.recipe.components import argument_named, declared_mapping, has_argument
from rlcli.recipe.expansion.call_keys import made_by
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
    for kind, prepared in missing_preparations(graph).items():
        assert isinstance(graph, MappingNode)
        holding = [
            name for name, entry in graph.entries.items() if kind in _preparing(entry.node).values()
        ]
        _check_agreement(kind, graph, holding, prepared, problems)
        call = _preparing_call(kind, graph, holding, prepared[0])
        renamed = _renamed_inputs(kind, graph, prepared)
        if renamed is not None:
            call = replace(call, node=with_entry(call.node, (REMAP,), renamed))
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


def _preparing_call(kind: str, graph: MappingNode, holding: list[str], first: str) -> Entry:
    """A call of the role of the first that needs it, with the arguments that calls hold for it."""
    mark = default_mark(f"PREPARED_BY of {_interface(graph.entries[first].node)}")
    arguments: dict[str, Entry] = {}
    for name in holding:
        arguments = {**_args(graph.entries[name].node), **arguments}
    taken = {
        key: entry for key, entry in arguments.items() if has_argument("interfaces", kind, key)
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
        for key, entry in entries_at(graph, (name, REMAP)).items()
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
    useless = [
        key
        for key in args.entries
        if not has_argument("interfaces", interface, key)
        and any(has_argument("interfaces", taker, key) for taker in (kind, *holders))
    ]
    return replace(entry, node=with_value(call, ARGS, args.without_keys(useless)))


def _with_inputs_of_today(entry: Entry) -> Entry:
    """A call that lists no inputs, and renames none that its interface does not read: it listed
    what it read before."""
    call = entry.node
    assert isinstance(call, MappingNode)
    call = call.without_keys(["inputs"])
    remap = call.get(REMAP)
    if isinstance(remap, MappingNode):
        read = read_by(_interface(call))
        unread = [key for key, meaning in plain(remap).items() if meaning not in read]
        call = with_value(call, (REMAP,), remap.without_keys(unread))
    return replace(entry, node=call)


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
