"""Checks the keys of calls against those that their interfaces' classes declare to read and
write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rlcli.api.declared_keys import DeclaredKeys
from rlcli.api.interface import RETURN_NUMBERS
from rlcli.recipe.call_keys import DECLARED_IN, Field, keys_of, made_by
from rlcli.recipe.components import argument_named, argument_of, declared, lacks_method
from rlcli.recipe.graph import producers
from rlcli.recipe.parsing.removal import place_of, removed_calls
from rlcli.recipe.parsing.tree import KeyPath, at, dotted, plain
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
        listed, keys = getattr(call, field), keys_of(field, call)
        for index, key in enumerate(listed):
            if key in listed[:index]:
                notes.note(
                    "R71", f"{dotted((*path, field))} lists {key} twice", (*path, field, index)
                )
        remap = f"{field.removesuffix('s')}_key_remap"
        for key, meant in getattr(call, remap).items():
            if key in listed:
                continue
            name, others, why = key, listed, "which the call does not list"
            if not is_listed(notes, path, field):
                if field == "inputs" and keys is not None and key in keys.needed:
                    continue  # `check_read` reports what the call lacks because of that
                name, others = (
                    (meant, keys.all if keys else ()) if field == "inputs" else (key, listed)
                )
                why = f"and {call.call} of {call.interface.type} does not {VERBS[field]} {name}"
            message = f"{dotted((*path, remap))} renames {key}, {why}"
            notes.note(
                "R71",
                message,
                (*path, remap, key),
                did_you_mean(name, others),
                needs=[(*path, field)],
            )


def check_read(
    notes: Notes,
    call: Call,
    path: KeyPath,
    makers: Mapping[str, list[str]],
    brought: Collection[str],
) -> None:
    """Every key that the interface needs must be an input. `makers`: batch key → the calls that
    produce it; `brought`: keys of the dataset's rows."""
    keys = keys_of("inputs", call)
    if keys is None:
        return
    received = {call.input_key_remap.get(key, key): index for index, key in enumerate(call.inputs)}
    lacking = [key for key in keys.needed if key not in received]
    available = {*makers, *brought}
    unread = [
        key
        for key, index in received.items()
        if key not in keys.all and call.inputs[index] not in available
    ]
    for key in list(lacking):
        near = nearest_name(key, unread)
        if near is not None:  # a typo: reported at its place, by the first check that sees it
            lacking.remove(key)
            unread.remove(near)
            index = received[near]
            message, path_of_key = _what(call, path, [key]), (*path, "inputs", index)
            notes.note(
                "R71",
                message,
                path_of_key,
                f"did you mean {key}?",
                _basis(path),
                same=call.inputs[index],
            )
    if lacking:
        arguments = [keys.due_to[key] for key in lacking if key in keys.due_to]
        args: KeyPath = (*path, "interface", "args")
        needs = [*_basis(path), *((*args, *name.split(".")) for name in arguments)]
        message, hint = _what(call, path, lacking), _remedy(call, keys, lacking, makers)
        path_of_key = place_of_key(notes, call, path, "inputs", "")
        notes.note("R71", message, path_of_key, hint, needs, same=f"lacks {lacking}")


def check_effects(
    notes: Notes, call: Call, calls: Mapping[str, Call], path: KeyPath, graph: KeyPath
) -> None:
    """An interface's class may declare in `NO_EFFECT_WITHOUT` that an argument needs a key, which
    another call may make only with some of that call's arguments."""
    kind, keys = call.interface.type, keys_of("inputs", call)
    received = {call.input_key_remap.get(key, key) for key in call.inputs}
    lacking = {*keys.if_given} - received if keys is not None else set()
    for argument, key in (declared("interfaces", kind, "NO_EFFECT_WITHOUT") or {}).items():
        signature = argument_named("interfaces", kind, argument)
        default = signature.default if signature is not None else None
        if key in lacking and call.interface.args.get(argument, default) != default:
            where: KeyPath = (*path, "interface", "args", argument)
            _without_effect(notes, where, default, key, _deciding(notes, key, calls, graph))


def _without_effect(
    notes: Notes, where: KeyPath, default: object, key: str, deciding: Mapping[KeyPath, str]
) -> None:
    """`deciding`: the arguments of other calls with which they would make the key, and why they do
    not."""
    argument, path, node = where[-1], where[:-3], at(notes.tree, where)
    value = plain(node) if node is not None else None
    setting = f"{argument}={value} of {dotted(path)}"
    message = "; ".join([f"{setting} has no effect: no call makes {key}", *deciding.values()])
    others = [f"change {other[-1]} of {other[-4]}" for other in deciding]
    hint = ", or ".join([f"set {argument}={default}", *others])
    notes.note("R71", message, where, hint, [*_basis(path), *deciding], same=str(argument))


def _deciding(
    notes: Notes, key: str, calls: Mapping[str, Call], graph: KeyPath
) -> dict[KeyPath, str]:
    """The arguments with which calls would make a key, and what they are now."""
    reasons: dict[KeyPath, str] = {}
    for name, call in calls.items():
        keys = keys_of("outputs", call)
        argument = keys.up_to.get(key) if keys is not None else None
        if argument is None:
            continue
        where: KeyPath = (*graph, name, "interface", "args", argument)
        value = argument_of("interfaces", call.interface.type, call.interface.args, argument)
        written = notes.mark(where) if notes.is_set(where) else "the default"
        reasons[where] = f"{name} would make it if {argument} were not {value} ({written})"
    return reasons


def check_made(
    notes: Notes,
    unmade: Mapping[str, list[str]],
    calls: Mapping[str, Call],
    brought: Collection[str],
    graph: KeyPath,
    basis: Iterable[KeyPath],
) -> None:
    """Report keys that calls read, as their interfaces declare, but that nothing makes: at the
    first reader, and once for all keys of one removed call. `unmade`: key → its readers;
    `brought`: keys of the dataset's rows."""
    available = {*producers(calls), *brought}
    remedies: dict[str, list[str]] = {}
    for key in unmade:
        is_named = any(_naming(calls[name], key) for name in unmade[key])
        near = did_you_mean(key, available) if is_named else None
        remedies.setdefault(near or _remedy_for(notes, key, calls, graph), []).append(key)
    for remedy, keys in remedies.items():
        readers = list(dict.fromkeys(name for key in keys for name in unmade[key]))
        reads = "read" if len(readers) > 1 else "reads"
        message = (
            f"{in_words(readers)} {reads} {in_words(keys)}, which neither a call nor the "
            "dataset provides"
        )
        instead = {
            setting_without(notes, calls[name], (*graph, name), key, available)
            for key in keys
            for name in unmade[key]
        }
        idle = [f"models.{role}=null" for role in unused_roles(notes)]
        settings = " ".join([*map(str, instead), *idle])
        hint = remedy if None in instead else f"{remedy}, or set {settings}"
        needs = [*basis, *((*graph, name, "inputs") for name in readers)]
        interface = (*graph, readers[0], "interface")
        naming = _naming(calls[readers[0]], keys[0])
        where = (*interface, "args", naming, keys[0]) if naming else (*interface, "type")
        if notes.note("R71", message, where, hint, needs, same=f"no call produces {keys}"):
            for name in notes.missed:  # references to a removed call vanish if it is kept
                notes.problems.withdraw((*graph, name))


def _naming(call: Call, key: str) -> str | None:
    """The argument of a call that has a key as one of its own, such as `weights`."""
    keys = keys_of("inputs", call)
    name = keys.due_to.get(key) if keys is not None else None
    value = call.interface.args.get(name) if name is not None else None
    return name if isinstance(value, dict) and key in value else None


def _remedy_for(notes: Notes, key: str, calls: Mapping[str, Call], graph: KeyPath) -> str:
    if removed := removed_maker(notes, graph, key):
        return f"{removed}: keep it"
    for name, call in calls.items():
        if key in call.outputs:
            return (
                f"{name} makes it as {call.output_key_remap[key]}: rename it in input_key_remap too"
            )
    return f"add a call that makes {key}"


def removed_maker(notes: Notes, graph: KeyPath, key: str) -> str | None:
    """`critic_inf, which made it, is removed at mine.yaml:3:8`, if that is why a key is missing."""
    for name, call, mark in removed_calls(notes.problems.written, graph):
        if key in made_by(call):
            notes.missed.add(name)
            return f"{name}, which made it, is removed {place_of(mark)}"
    return None


def _what(call: Call, path: KeyPath, keys: list[str]) -> str:
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
