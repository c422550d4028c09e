"""Keys of calls that do not list any: those their interfaces declare,
given the call's arguments and renames.

`outputs` are the keys of WRITES that apply with these arguments. `inputs` are those of READS, and
of its `KEY if given` those available: from the dataset, or from a call that does not wait for this
one. Whatever a call lists, it also reads the companions of its keys (`COMPANIONS`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from rlcli.api.declared_keys import DeclaredKeys
from rlcli.api.interface import RETURN_NUMBERS
from rlcli.api.key_meaning import COMPANIONS
from rlcli.recipe.components import dataset_keys, declared_mapping, declared_of_call
from rlcli.recipe.graph import graphs_of, producers, waits_for
from rlcli.recipe.parsing.tree import (
    Entry,
    KeyPath,
    MappingNode,
    Node,
    at,
    default_mark,
    node_of,
    plain,
    with_entry,
)
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.schema import Call, Recipe

Field = Literal["inputs", "outputs"]
DECLARED_IN: Mapping[Field, Literal["READS", "WRITES"]] = {"inputs": "READS", "outputs": "WRITES"}
RENAMED_IN: Mapping[Field, str] = {"inputs": "input_key_remap", "outputs": "output_key_remap"}


def keys_of(field: Field, call: Call) -> DeclaredKeys | None:
    """The keys a call's interface declares, given the call's arguments;
    None if it declares none."""
    if field == "outputs" and call.call in RETURN_NUMBERS:
        return DeclaredKeys((), ())
    return declared_of_call(DECLARED_IN[field], call)


def made_by(call: Node | None) -> list[str]:
    """The batch keys that a call makes, or may make, as written in a layer:
    references are not followed."""
    written: Any = plain(call) if isinstance(call, MappingNode) else {}
    keys, renamed = written.get("outputs"), written.get("output_key_remap")
    if not isinstance(keys, list):
        keys = _declared_outputs(written)
    named = [key for key in keys if isinstance(key, str)]
    return [str(renamed.get(key, key)) if isinstance(renamed, dict) else key for key in named]


def _declared_outputs(call: Mapping[str, Any]) -> list[str]:
    """The keys that the interface of a call, as written, declares, with any arguments."""
    interface = call.get("interface")
    kind = interface.get("type") if isinstance(interface, dict) else None
    declaration = declared_mapping("interfaces", str(kind), "WRITES")
    return [str(entry).partition(" ")[0] for entry in declaration.get(str(call.get("call"))) or ()]


def with_declared_keys(calls: Mapping[str, Call], brought: Collection[str]) -> dict[str, Call]:
    """The calls, each with the keys that it lists or, if it lists none, those of its interface.
    `brought`: keys of the dataset's rows."""
    calls = {
        name: _listing(call, outputs=needed_keys("outputs", call)) for name, call in calls.items()
    }
    silent = [name for name, call in calls.items() if "inputs" not in call.model_fields_set]
    calls |= {
        name: _listing(calls[name], inputs=needed_keys("inputs", calls[name])) for name in silent
    }
    for name in silent:
        given_keys = _given(name, calls, brought)
        calls[name] = calls[name].model_copy(update={"inputs": [*calls[name].inputs, *given_keys]})
    return _with_companions(calls)


def _with_companions(calls: Mapping[str, Call]) -> dict[str, Call]:
    """The calls, each with the keys that go along with what it reads, if the same call makes
    them."""
    makers, completed = producers(calls), {}
    for name, call in calls.items():
        companions = [
            COMPANIONS[key]
            for key in call.inputs
            if key in COMPANIONS and makers.get(key) == makers.get(COMPANIONS[key], [])
        ]
        lacking = [key for key in companions if key not in call.inputs]
        completed[name] = call.model_copy(update={"inputs": [*call.inputs, *lacking]})
    return completed


def _listing(call: Call, **fields: list[str]) -> Call:
    return call.model_copy(
        update={name: keys for name, keys in fields.items() if name not in call.model_fields_set}
    )


def needed_keys(field: Field, call: Call) -> list[str]:
    """The batch keys that a call reads or writes whatever else it receives."""
    keys = keys_of(field, call)
    if keys is None:
        return []
    if field == "outputs":
        return list(keys.needed)
    renamed = call.input_key_remap.values()
    read = [key for key in keys.all if key in keys.needed or key in renamed]
    return [name for key in read for name in _names_of(key, call)]


def _names_of(key: str, call: Call) -> list[str]:
    """Batch names of a key that the interface reads; none if a rename takes it away."""
    renamed = [name for name, meant in call.input_key_remap.items() if meant == key]
    return renamed or ([key] if key not in call.input_key_remap else [])


def _given(name: str, calls: Mapping[str, Call], brought: Collection[str]) -> list[str]:
    """The available keys among those that a call reads if given."""
    call = calls[name]
    keys = keys_of("inputs", call)
    makers, waits = producers(calls), waits_for(calls)

    def is_available(key: str) -> bool:
        if key not in makers:
            return key in brought
        return not any(_waits(maker, name, waits) for maker in makers[key])

    optional = keys.if_given if keys is not None else ()
    candidates = [key for declared_key in optional for key in _names_of(declared_key, call)]
    return [key for key in candidates if key not in call.inputs and is_available(key)]


def _waits(call: str, earlier: str, waits: Mapping[str, Collection[str]]) -> bool:
    """Whether a call is the other one, or waits for it, directly or indirectly."""
    seen, following = set[str](), [call]
    while following:
        name = following.pop()
        if name not in seen:
            seen.add(name)
            following.extend(waits[name])
    return earlier in seen


# -- in a recipe -----------------------------------------------------------------------------------


def with_keys_of_calls(
    recipe: Recipe, tree: MappingNode, unresolved: Unresolved
) -> tuple[Recipe, MappingNode]:
    """The recipe and its tree, with every call's keys filled in.
    Keys derived from doubtful values are doubtful."""
    graphs: list[dict[str, Call]] = []
    for path, calls, dataset in graphs_of(recipe):
        brought = dataset_keys(recipe.datasets, dataset)
        completed = with_declared_keys(calls, brought or ())
        graphs.append(completed)
        for name, call in completed.items():
            for field in DECLARED_IN:
                if field not in calls[name].model_fields_set:
                    _judge((*path, name), field, tree, unresolved)
                    tree = _with_list(tree, (*path, name), field, call)
    evaluation = recipe.train.eval.model_copy(update={"graph": graphs[1]})
    train = recipe.train.model_copy(update={"eval": evaluation})
    return recipe.model_copy(update={"graph": graphs[0], "train": train}), tree


def _judge(path: KeyPath, field: Field, tree: MappingNode, unresolved: Unresolved) -> None:
    basis = ["call", "interface", RENAMED_IN[field]]
    if unresolved.about_absence(tree, (*path, field)) or any(
        unresolved.about_part((*path, key)) for key in basis
    ):
        unresolved.values.add((*path, field))


def _with_list(tree: MappingNode, path: KeyPath, field: Field, call: Call) -> MappingNode:
    if not isinstance(at(tree, path), MappingNode):
        return tree
    mark = default_mark(f"{DECLARED_IN[field]} of {call.interface.type}")
    return with_entry(tree, (*path, field), Entry(mark, node_of(getattr(call, field), mark)))
