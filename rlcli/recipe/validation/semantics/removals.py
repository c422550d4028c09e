"""Settings with which the calls of a graph do without others, which null removes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from rlcli.recipe.components import signature_of
from rlcli.recipe.expansion.call_keys import keys_of, needed_keys
from rlcli.recipe.graph import available_keys, graphs_of, producers
from rlcli.recipe.parsing.merge import reference_below
from rlcli.recipe.parsing.tree import KeyPath, at, dotted
from rlcli.recipe.schema import Call
from rlcli.recipe.schema_types import field_at, options
from rlcli.recipe.validation.semantics.notes import Notes, in_words


def setting_without(
    notes: Notes, call: Call, path: KeyPath, key: str, available: Collection[str]
) -> str | None:
    """The setting, such as `ppo.kl_ctl=0`, with which a call does not read a key, nor another that
    is not available; None if there is none."""
    keys = keys_of("inputs", call)
    name = keys.due_to.get(call.input_key_remap.get(key, key)) if keys is not None else None
    for value in _values(call.interface.type, name) if name is not None else ():
        args: dict[str, Any] = {**call.interface.args, str(name): value}
        interface = call.interface.model_copy(update={"args": args})
        needed = needed_keys("inputs", call.model_copy(update={"interface": interface}))
        if key not in needed and set(needed) <= {*available}:
            section = (*path, "interface", "args")
            home = reference_below(at(notes.problems.written, section)) or dotted(section)
            return f"{home}.{name}={json.dumps(value)}"
    return None


def _values(interface: str, argument: str) -> Iterator[Any]:
    """Values that an argument of an interface may have, one or more of each of its types."""
    field = field_at(signature_of("interfaces", interface).model(only=[argument]), argument)
    for option in options(field.annotation) if field is not None else ():
        if option is bool:
            yield from (False, True)
        elif option in (int, float):
            yield 0
        elif option is type(None):
            yield None
        elif get_origin(option) is Literal:
            yield from get_args(option)


def without_role(notes: Notes, role: str, paths: Sequence[KeyPath]) -> str:
    """What to do about a removed role that calls still name: remove these too, with the settings
    that this needs, or keep the role."""
    starting = [name for name, other in notes.recipe.models.items() if other.init == role]
    if starting:
        return f"keep it: {in_words(starting)} start{'' if starting[1:] else 's'} from it"
    if all(call.model == role for call in notes.recipe.graph.values()):
        return "keep it: the graph has no other calls"
    settings: dict[str, None] = {}
    for call, path, key, available in _readers_of_lost_keys(notes, role):
        setting = setting_without(notes, call, path, key, available)
        if setting is None:
            return f"keep it: {path[-1]} needs {key}"
        settings[setting] = None
    return _removals(paths, settings)


def _removals(paths: Sequence[KeyPath], settings: Collection[str]) -> str:
    removals = " ".join(f"{dotted(path)}=null" for path in paths)
    also = f", and set {' '.join(settings)}" if settings else ""
    return f"remove the call{'s' if paths[1:] else ''} too: {removals}{also}"


def _readers_of_lost_keys(
    notes: Notes, role: str
) -> Iterator[tuple[Call, KeyPath, str, list[str]]]:
    """The calls that need a key that only the calls of a role make: the call, its path, the key,
    and the keys that there would still be."""
    for graph in graphs_of(notes.recipe):
        others = {name: call for name, call in graph.calls.items() if call.model != role}
        available = available_keys(notes.recipe, graph._replace(calls=others))
        lost = producers(graph.calls).keys() - {*available}
        for name, call in others.items():
            needed = needed_keys("inputs", call)
            yield from ((call, graph.at(name), key, available) for key in needed if key in lost)
