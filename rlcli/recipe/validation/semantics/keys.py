"""Checks the keys of calls against those that their interfaces' classes declare to read and
write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlcli.api.declared_keys import DeclaredKeys
from rlcli.api.interface import RETURN_NUMBERS
from rlcli.recipe.components import argument_named, argument_of, declared_mapping, lacks_method
from rlcli.recipe.expansion.call_keys import DECLARED_IN, RENAMED_IN, Field, keys_of, made_by
from rlcli.recipe.graph import Graph, available_keys, producers
from rlcli.recipe.parsing.removal import place_of, removed_calls
from rlcli.recipe.parsing.tree import KeyPath, dotted, value_at
from rlcli.recipe.schema import Call
from rlcli.recipe.validation.semantics.models import unused_roles
from rlcli.recipe.validation.semantics.notes import Notes, in_words
from rlcli.recipe.validation.semantics.removals import setting_without
from rlcli.spelling import did_you_mean, nearest_name

VERBS: Mapping[Field, str] = {"inputs": "read", "outputs": "write"}


def is_listed(notes: Notes, path: KeyPath, field: Field) -> bool:
    """Whether some layer lists the keys of a call."""
    return not notes.mark((*path, field)).is_default


def place_of_key(notes: Notes, call: Call, path: KeyPath, field: Field, key: str) -> KeyPath:
    """Where to point for a key of a call: at its entry in the list,
    or at the interface that declares it."""
    listed = getattr(call, field)
    if not is_listed(notes, path, field):
        return (*path, "interface", "type")
    return (*path, field, listed.index(key)) if key in listed else (*path, field)


def check_declared(notes: Notes, call: Call, path: KeyPath) -> None:
    """A call that lists no keys uses those its interface declares,
    so the interface must declare them."""
    fields = [
        field
        for field in DECLARED_IN
        if not is_listed(notes, path, field) and keys_of(field, call) is None
    ]
    if not fields or lacks_method(call.interface.type, call.call):
        return
    kind, verbs = call.interface.type, " and ".join(f"{VERBS[field]}s" for field in fields)
    message = (
        f"{dotted(path)} lists no {' and no '.join(fields)}, and {kind} does not declare "
        f"what {call.call} {verbs}"
    )
    example = f'{DECLARED_IN[fields[0]]} = {{"{call.call}": ("a_key",)}}'
    hint = f"list the keys, or declare them in its class: {example}"
    needs = [(*path, field) for field in fields]
    notes.note(
        "R39",
        message,
        (*path, "interface", "type"),
        hint,
        needs,
        same=f"{kind} declares no {fields}",
    )
    notes.unresolved.values.update(needs)


def check_written(notes: Notes, call: Call, path: KeyPath) -> None:
    """Every output must be a key that the interface returns.
    A reader of a wrong one gets no second report."""
    keys = keys_of("outputs", call)
    if keys is None or not is_listed(notes, path, "outputs"):
        return
    for index, key in enumerate(call.outputs):
        if key not in keys.all:
            message = (
                f"{dotted(path)} lists the output {key}, which {call.call} of "
                f"{call.interface.type} does not write"
            )
            does = (
                "returns numbers for the log"
                if call.call in RETURN_NUMBERS
                else f"writes {', '.join(keys.all)}"
            )
            unlisted = [output for output in keys.all if output not in call.outputs]
            hint = did_you_mean(key, unlisted, f"{call.call if not keys.all else 'it'} {does}")
            notes.note("R71", message, (*path, "outputs", index), hint, _basis(path))
            notes.unresolved.values.add((*path, "outputs"))


def check_renames(notes: Notes, call: Call, path: KeyPath) -> None:
    """A rename must be of a key that the call has, and no key may be listed twice."""
    for field in DECLARED_IN:
        _check_repeats(notes, getattr(call, field), (*path, field))
        _check_remap(notes, call, path, field)


def _check_repeats(notes: Notes, listed: Sequence[str], path: KeyPath) -> None:
    for index, key in enumerate(listed):
        if key in listed[:index]:
            notes.note("R71", f"{dotted(path)} lists {key} twice", (*path, index))


def _check_remap(notes: Notes, call: Call, path: KeyPath, field: Field) -> None:
    """Report renames of keys that a call does not list or, if it lists none, that its interface
    does not have."""
    remap, names = (*path, RENAMED_IN[field]), getattr(call, field)
    has_list = is_listed(notes, path, field)
    means_declared = field == "inputs" and not has_list
    keys = keys_of(field, call) if means_declared else None
    passed = {*names}
    if keys is not None:
        passed |= {*keys.needed}  # `check_read` reports what the call lacks because of a rename
        names = keys.all
    for key, meant in getattr(call, RENAMED_IN[field]).items():
        if key not in passed:
            name = meant if means_declared else key
            why = "which the call does not list" if has_list else _does_not(call, field, name)
            message = f"{dotted(remap)} renames {key}, {why}"
            hint = did_you_mean(name, names)
            notes.note("R71", message, (*remap, key), hint, needs=[(*path, field)])


def _does_not(call: Call, field: Field, key: str) -> str:
    return f"and {call.call} of {call.interface.type} does not {VERBS[field]} {key}"


def check_read(notes: Notes, graph: Graph, name: str) -> None:
    """Every key that the interface of a call needs must be an input."""
    call = graph.calls[name]
    keys = keys_of("inputs", call)
    if keys is None:
        return
    positions = _positions_of_inputs(call)
    available = available_keys(notes.recipe, graph)
    unread = [
        key
        for key, index in positions.items()
        if key not in keys.all and call.inputs[index] not in available
    ]
    lacking: list[str] = []
    for key in [needed for needed in keys.needed if needed not in positions]:
        near = nearest_name(key, unread)
        if near is None:
            lacking.append(key)
        else:
            unread.remove(near)
            _note_misspelt(notes, call, graph.at(name), positions[near], key)
    if lacking:
        _note_lacking(notes, graph, name, keys, lacking)


def _positions_of_inputs(call: Call) -> dict[str, int]:
    """Key as the interface reads it → which of the call's inputs it is."""
    return {call.input_key_remap.get(key, key): index for index, key in enumerate(call.inputs)}


def _note_misspelt(notes: Notes, call: Call, path: KeyPath, index: int, key: str) -> None:
    """Report a misspelt input at its place, by the first check that sees it."""
    message, hint = _lacks(call, path, [key]), f"did you mean {key}?"
    where = (*path, "inputs", index)
    notes.note("R71", message, where, hint, _basis(path), same=call.inputs[index])


def _note_lacking(
    notes: Notes, graph: Graph, name: str, keys: DeclaredKeys, lacking: list[str]
) -> None:
    call, path = graph.calls[name], graph.at(name)
    arguments = [keys.due_to[key] for key in lacking if key in keys.due_to]
    needs = _basis(path)
    needs += [(*path, "interface", "args", *argument.split(".")) for argument in arguments]
    hint = _remedy(call, keys, lacking, producers(graph.calls))
    where = place_of_key(notes, call, path, "inputs", "")
    notes.note("R71", _lacks(call, path, lacking), where, hint, needs, same=f"lacks {lacking}")


def check_effects(notes: Notes, graph: Graph, name: str) -> None:
    """An interface's class may declare in `NO_EFFECT_WITHOUT` that an argument needs a key, which
    another call may make only with some of that call's arguments."""
    call = graph.calls[name]
    kind, keys = call.interface.type, keys_of("inputs", call)
    lacking = {*keys.if_given} - {*_positions_of_inputs(call)} if keys is not None else set()
    for argument, key in declared_mapping("interfaces", kind, "NO_EFFECT_WITHOUT").items():
        signature = argument_named("interfaces", kind, argument)
        default = signature.default if signature is not None else None
        if key in lacking and call.interface.args.get(argument, default) != default:
            where = graph.at(name, "interface", "args", argument)
            _without_effect(notes, where, default, key, _deciding(notes, graph, key))


def _without_effect(
    notes: Notes, where: KeyPath, default: object, key: str, deciding: Mapping[KeyPath, str]
) -> None:
    """`deciding`: the arguments of other calls with which they would make the key, and why they do
    not."""
    argument, path = where[-1], where[:-3]
    setting = f"{argument}={value_at(notes.tree, where)} of {dotted(path)}"
    message = "; ".join([f"{setting} has no effect: no call makes {key}", *deciding.values()])
    others = [f"change {other[-1]} of {other[-4]}" for other in deciding]
    hint = ", or ".join([f"set {argument}={default}", *others])
    notes.note("R71", message, where, hint, [*_basis(path), *deciding], same=str(argument))


def _deciding(notes: Notes, graph: Graph, key: str) -> dict[KeyPath, str]:
    """The arguments with which calls would make a key, and what they are now."""
    reasons: dict[KeyPath, str] = {}
    for name, call in graph.calls.items():
        keys = keys_of("outputs", call)
        argument = keys.up_to.get(key) if keys is not None else None
        if argument is None:
            continue
        where = graph.at(name, "interface", "args", argument)
        value = argument_of("interfaces", call.interface, argument)
        written = notes.mark(where) if notes.is_set(where) else "the default"
        reasons[where] = f"{name} would make it if {argument} were not {value} ({written})"
    return reasons


def check_made(
    notes: Notes, graph: Graph, unmade: Mapping[str, list[str]], basis: Iterable[KeyPath]
) -> None:
    """Report keys that calls read, as their interfaces declare, but that nothing makes: at the
    first reader, and once for all keys of one removed call. `unmade`: key → its readers."""
    for remedy, keys in _by_remedy(notes, graph, unmade).items():
        readers = readers_of(keys, unmade)
        message = f"{they_read(readers, keys)}, which neither a call nor the dataset provides"
        hint = _or_settings(notes, graph, remedy, {key: unmade[key] for key in keys})
        needs = [*basis, *(graph.at(name, "inputs") for name in readers)]
        where = _place_of_need(graph, readers[0], keys[0])
        if notes.note("R71", message, where, hint, needs, same=f"no call produces {keys}"):
            for name in notes.missed:  # references to a removed call vanish if it is kept
                notes.problems.withdraw(graph.at(name))


def readers_of(keys: Iterable[str], unmade: Mapping[str, list[str]]) -> list[str]:
    """The calls that read some of the keys that nothing makes."""
    return list(dict.fromkeys(name for key in keys for name in unmade[key]))


def they_read(readers: Sequence[str], keys: Iterable[str]) -> str:
    """`ref_inf and dpo_train read packed_input_ids`."""
    return f"{in_words(readers)} {'read' if len(readers) > 1 else 'reads'} {in_words(keys)}"


def _by_remedy(notes: Notes, graph: Graph, unmade: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """What helps against a key that nothing makes → the keys that it helps against."""
    available = available_keys(notes.recipe, graph)
    remedies: dict[str, list[str]] = {}
    for key, readers in unmade.items():
        is_named = any(_naming(graph.calls[name], key) for name in readers)
        near = did_you_mean(key, available) if is_named else None
        remedies.setdefault(near or _remedy_for(notes, graph, key), []).append(key)
    return remedies


def _or_settings(notes: Notes, graph: Graph, remedy: str, unmade: Mapping[str, list[str]]) -> str:
    """What helps, or else the settings with which no call reads the keys that nothing makes."""
    available = available_keys(notes.recipe, graph)
    settings = {
        setting_without(notes, graph.calls[name], graph.at(name), key, available)
        for key, readers in unmade.items()
        for name in readers
    }
    if None in settings:
        return remedy
    idle = [f"models.{role}=null" for role in unused_roles(notes)]
    return f"{remedy}, or set {' '.join([*sorted(map(str, settings)), *idle])}"


def _place_of_need(graph: Graph, reader: str, key: str) -> KeyPath:
    """Where a call says that it reads a key: in an argument, or by its interface."""
    argument = _naming(graph.calls[reader], key)
    where = ("type",) if argument is None else ("args", argument, key)
    return graph.at(reader, "interface", *where)


def _naming(call: Call, key: str) -> str | None:
    """The argument of a call that has a key as one of its own, such as `weights`."""
    keys = keys_of("inputs", call)
    name = keys.due_to.get(key) if keys is not None else None
    value = call.interface.args.get(name) if name is not None else None
    return name if isinstance(value, dict) and key in value else None


def _remedy_for(notes: Notes, graph: Graph, key: str) -> str:
    if removed := removed_maker(notes, graph, key):
        return f"{removed}: keep it"
    for name, call in graph.calls.items():
        if key in call.outputs:
            new_name = call.output_key_remap[key]
            return f"{name} makes it as {new_name}: rename it in input_key_remap too"
    return f"add a call that makes {key}"


def removed_maker(notes: Notes, graph: Graph, key: str) -> str | None:
    """`critic_inf, which made it, is removed at mine.yaml:3:8`, if that is why a key is missing."""
    for name, call, mark in removed_calls(notes.problems.written, graph.path):
        if key in made_by(call):
            notes.missed.add(name)
            return f"{name}, which made it, is removed {place_of(mark)}"
    return None


def _lacks(call: Call, path: KeyPath, keys: list[str]) -> str:
    return (
        f"{dotted(path)} lacks the input {', '.join(keys)}, which {call.call} of "
        f"{call.interface.type} reads"
    )


def _remedy(
    call: Call, keys: DeclaredKeys, lacking: list[str], makers: Mapping[str, list[str]]
) -> str:
    first = lacking[0]
    if first in call.input_key_remap:
        return f"its input_key_remap renames {first} to {call.input_key_remap[first]}"
    if len(lacking) > 1:
        return f"add {'both' if len(lacking) == 2 else 'all'} to its inputs"
    maker = f" ({makers[first][0]} makes it)" if first in makers else ""
    instead = f", or change {keys.due_to[first]}" if first in keys.due_to else ""
    return f"add it to its inputs{maker}{instead}"


def _basis(path: KeyPath) -> list[KeyPath]:
    """The paths that a verdict about a call's keys depends on."""
    fields = (("interface", "type"), ("call",), ("inputs",), ("input_key_remap",))
    return [(*path, *field) for field in fields]
