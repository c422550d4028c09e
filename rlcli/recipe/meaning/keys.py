"""The keys of a call are those that its interface reads and writes, where the interface's class declares them."""

from __future__ import annotations

from collections.abc import Mapping as ReadMapping
from typing import Any

from rlcli.api.declared_keys import DeclaredKeys, declared_keys
from rlcli.api.interface import RETURN_NUMBERS
from rlcli.recipe.components import argument_of, declared
from rlcli.recipe.meaning.notes import Notes
from rlcli.recipe.schema import Call
from rlcli.recipe.suggest import close_to
from rlcli.recipe.tree import Path, dotted
from rlcli.registry import COMPUTED


def check_written(notes: Notes, call: Call, path: Path) -> None:
    """Every output is a key that the interface returns. What reads a wrong one is not told that nobody makes it."""
    keys = DeclaredKeys((), ()) if call.call in RETURN_NUMBERS else _declared("WRITES", call)
    if keys is None:
        return
    for index, key in enumerate(call.outputs):
        if key not in keys.all:
            what = f"{dotted(path)} lists the output {key}, which {call.call} of {call.interface.type} does not write"
            near = close_to(key, [other for other in keys.all if other not in call.outputs])
            does = f"it writes {', '.join(keys.all)}" if keys.all else f"{call.call} returns numbers for the log"
            notes.note("R71", what, (*path, "outputs", index), f"did you mean {near}?" if near else does, _basis(path))
            notes.doubts.values.add((*path, "outputs"))


def check_read(notes: Notes, call: Call, path: Path, makers: ReadMapping[str, list[str]]) -> None:
    """Every key that the interface needs is an input. `makers`: key of the batch → the calls that produce it."""
    keys = _declared("READS", call)
    if keys is None:
        return
    received = {call.input_key_remap.get(key, key): index for index, key in enumerate(call.inputs)}
    lacking = [key for key in keys.needed if key not in received]
    unread = [key for key in received if key not in keys.all]
    for key in list(lacking):
        near = close_to(key, unread)
        if near is not None:  # a slip: told where it stands, by whoever sees it first
            lacking.remove(key)
            unread.remove(near)
            index = received[near]
            what, place = _what(call, path, [key]), (*path, "inputs", index)
            notes.note("R71", what, place, f"did you mean {key}?", _basis(path), same=call.inputs[index])
    if lacking:
        arguments = [keys.due_to[key] for key in lacking if key in keys.due_to]
        needs = [*_basis(path), *((*path, "interface", "args", name) for name in arguments)]
        what, hint = _what(call, path, lacking), _remedy(call, keys, lacking, makers)
        notes.note("R71", what, (*path, "inputs"), hint, needs, same=f"lacks {lacking}")


def _declared(constant: str, call: Call) -> DeclaredKeys | None:
    """What the class of a call's interface declares, under the arguments of the call."""
    declaration = declared("interfaces", call.interface.type, constant)
    entries = declaration.get(call.call) if isinstance(declaration, dict) else None
    if not isinstance(entries, tuple | list) or not all(isinstance(entry, str) for entry in entries):
        return None

    def argument(name: str) -> Any:
        value = argument_of("interfaces", call.interface.type, call.interface.args, name)
        if value is COMPUTED:
            raise LookupError(name)
        return value

    try:
        return declared_keys(entries, argument)
    except ValueError:
        return None  # `rlcli test interface` says so


def _what(call: Call, path: Path, keys: list[str]) -> str:
    return f"{dotted(path)} lacks the input {', '.join(keys)}, which {call.call} of {call.interface.type} reads"


def _remedy(call: Call, keys: DeclaredKeys, lacking: list[str], makers: ReadMapping[str, list[str]]) -> str:
    first = lacking[0]
    if first in call.input_key_remap:
        return f"its input_key_remap renames {first} to {call.input_key_remap[first]}"
    if len(lacking) > 1:
        return f"add {'both' if len(lacking) == 2 else 'all'} to its inputs"
    made = f" ({makers[first][0]} makes it)" if first in makers else ""
    instead = f", or change {keys.due_to[first]}" if first in keys.due_to else ""
    return f"add it to its inputs{made}{instead}"


def _basis(path: Path) -> list[Path]:
    """What a judgement about a call's keys rests on."""
    fields = (("interface", "type"), ("call",), ("inputs",), ("input_key_remap",))
    return [(*path, *field) for field in fields]
