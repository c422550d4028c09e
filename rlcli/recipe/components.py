"""Checks the components that a recipe names, and their arguments,
against the signatures in their source."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar, get_args

from rlcli import registry
from rlcli.api import default_backends
from rlcli.api.declared_keys import DeclaredKeys, declared_keys
from rlcli.errors import ProjectError, UnknownComponent, UsageError
from rlcli.recipe.parsing.places import component_paths
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.removal import place_of, removed_calls, without_removed
from rlcli.recipe.parsing.tree import (
    Entry,
    KeyPath,
    MappingNode,
    Mark,
    Node,
    Scalar,
    at,
    default_mark,
    dotted,
    entries_at,
    is_null,
    keys_at,
    kind_of,
    node_of,
    plain,
    with_entry,
    with_value,
)
from rlcli.recipe.schema import WEIGHTS, Call, Component, Role
from rlcli.recipe.validation.unresolved import Unresolved
from rlcli.recipe.validation.validate import check_against

T = TypeVar("T")


def with_backends(tree: MappingNode, unresolved: Unresolved | None = None) -> MappingNode:
    """Give every role without a backend in any layer its default one;
    a doubtful guess is recorded."""
    for name in keys_at(tree, ("models",)):
        role, rollout = at(tree, ("models", name)), at(tree, ("models", name, "rollout"))
        if isinstance(role, MappingNode) and _names_no_backend(role):
            kind = _default_backend(tree, name, role)
            if unresolved is not None and not _is_sure(tree, name, role, kind, unresolved):
                unresolved.values.add(("models", name, "backend", "type"))
            tree = _with_backend(tree, ("models", name, "backend"), kind)
        if isinstance(rollout, MappingNode) and _names_no_backend(rollout):
            tree = _with_backend(
                tree, ("models", name, "rollout", "backend"), default_backends.UNTRAINED
            )
    return tree


def _with_backend(tree: MappingNode, path: KeyPath, kind: str) -> MappingNode:
    node, mark = at(tree, path), default_mark()
    backend = node if isinstance(node, MappingNode) else MappingNode({}, mark)
    typed = {"type": Entry(mark, node_of(kind, mark))}
    return with_entry(
        tree, path, Entry(backend.mark, replace(backend, entries={**typed, **backend.entries}))
    )


def _names_no_backend(section: MappingNode) -> bool:
    node = section.get("backend")
    if isinstance(node, MappingNode):
        return "type" not in node.entries
    return node is None or is_null(node)


def _default_backend(tree: MappingNode, name: str, role: MappingNode) -> str:
    weights = (role.get(key) for key in WEIGHTS)
    is_set_up = bool(entries_at(role, ("backend", "args")))
    if not is_set_up and all(node is None or is_null(node) for node in weights):
        return default_backends.WEIGHTLESS
    calls = [plain(entry.node) for entry in entries_at(tree, ("graph",)).values()]
    trains = [
        call.get("model")
        for call in calls
        if isinstance(call, dict) and call.get("call") == "train_step"
    ]
    return default_backends.TRAINED if name in trains else default_backends.UNTRAINED


def _is_sure(
    tree: MappingNode, name: str, role: MappingNode, guess: str, unresolved: Unresolved
) -> bool:
    """Whether everything that the guess of a role's backend depends on was understood."""
    if guess == default_backends.WEIGHTLESS:
        misspelt = any(key not in Role.model_fields for key in role.entries)
        return not misspelt and not any(
            unresolved.about_part(("models", name, key)) for key in WEIGHTS
        )
    if guess == default_backends.TRAINED:
        return True
    graph, models = tree.get("graph"), tree.get("models")
    if not isinstance(graph, MappingNode) or not isinstance(models, MappingNode):
        return False
    calls = [call for call in plain(graph).values() if isinstance(call, dict)]
    legal = get_args(Call.model_fields["call"].annotation)
    # a misspelt role may stand for any
    knows = all(str(call.get("model")) in models.entries for call in calls)
    return knows and all(call.get("call") in legal for call in calls if call.get("model") == name)


def check_components(tree: MappingNode, problems: Problems, unresolved: Unresolved) -> MappingNode:
    """Check every named component. Returns the tree, with arguments converted to their types."""
    takers = _takers(tree, problems)
    for path, kind in component_paths(tree):
        node = at(tree, path)
        if not isinstance(node, MappingNode) or (name := _name_of(node, kind)) is None:
            continue
        if name is not node.get("type"):
            tree = with_value(tree, (*path, "type"), name)
        if unresolved.about((*path, "type")):
            continue
        signature = _readable_signature(kind, name, problems)
        args = node.get("args") or MappingNode({}, name.mark)
        if signature is None:
            unresolved.values.add((*path, "type"))
            continue
        if not isinstance(args, MappingNode):
            problems.add(
                "R37",
                f"args must be a mapping, found {kind_of(args)}",
                args.mark,
                hint=_missing_space(args),
            )
            tree = unresolved.drop_from(tree, (*path, "args"))
            continue
        if not args.entries and not any(argument.required for argument in signature.arguments):
            continue
        legal = tuple(argument.name for argument in signature.arguments)
        args = _own(args, legal, takers)
        model = _read(partial(signature.model, only=args.entries), name, problems)
        if model is None:
            continue
        args = without_removed(model, args, problems, prefix=(*path, "args"))
        args = _without_leftovers(args, legal, takers, path, problems)
        unknown = [entry.key for key, entry in args.entries.items() if key not in legal]
        legal = tuple(
            dict.fromkeys(
                [*legal, *(argument for mark in unknown for argument in takers[mark].legal)]
            )
        )
        checked = check_against(
            model,
            args,
            problems,
            unresolved,
            prefix=(*path, "args"),
            legal=legal,
            component=signature.name,
        )
        if node.get("args") is not None:
            tree = with_value(tree, (*path, "args"), checked.tree)
    return tree


def _missing_space(node: Node) -> str | None:
    """The hint for a text that was meant as a key and its value."""
    text = node.value if isinstance(node, Scalar) else None
    if not isinstance(text, str) or not (written := re.fullmatch(r"([A-Za-z_]\w*):(\S+)", text)):
        return None
    return f"write {written[1]}: {written[2]}, with a space after the colon"


def _readable_signature(kind: str, name: Scalar, problems: Problems) -> registry.Signature | None:
    """A component's signature; None, with the reason reported, if there is none."""
    component = str(name.value)
    is_known = known_signature(kind, component) is not None
    by = replaced_interfaces().get(component) if kind == "interfaces" and not is_known else None
    if by is None:
        return _read(partial(signature_of, kind, component), name, problems)
    message = (
        f"the interface {name.value} is now {by['by']}, with a call of "
        f"{by['prepared_by']} before it"
    )
    problems.add("R70", message, name.mark, "rlcli migrate FILE rewrites the recipe")
    return None


def _name_of(node: MappingNode, kind: str) -> Scalar | None:
    """The component that a node names; None if it names none, or something that the schema reports.
    `type: null` names the backend of that name."""
    name = node.get("type")
    if not isinstance(name, Scalar) or (name.value is None and kind != "backends"):
        return None
    if isinstance(name.value, str) or not name.text:
        return name
    return Scalar(name.text, name.mark, name.text, plain=False)


def _without_leftovers(
    args: MappingNode,
    legal: Collection[str],
    takers: Mapping[Mark, _Takers],
    path: KeyPath,
    problems: Problems,
) -> MappingNode:
    """Drop the arguments that layers wrote for another component, before a later layer chose this
    one, or one that the arguments are shared with. Those of built-in layers vanish with it; the
    user's are refused, as one problem."""
    left: dict[str, Entry] = {}
    refused: dict[str, str] = {}
    for key, entry in args.entries.items():
        chosen = takers[entry.key].chosen
        later = [words for mark, words in chosen if problems.is_below(entry.key, mark)]
        if later and key not in legal:
            left[key] = entry
            if not problems.is_built_in(entry.key):
                refused[key] = later[0]
    entries = {key: entry for key, entry in args.entries.items() if key not in left}
    if refused:
        first = next(iter(refused))
        message = f"{refused[first]}; it has no argument {' or '.join(refused)}"
        section = dotted((*path, "args"))
        names = [_name_written(left[key].key, section, key, problems) for key in refused]
        if not entries and all(name.startswith(f"{section}.") for name in names):
            names = [section]
        drop = " ".join(f"{name}=null" for name in names)
        hint = f"remove what it does not have: {drop}"
        problems.add("R71", message, left[first].key, hint, section=(*path, "args"))
    return replace(args, entries=entries)


def _name_written(mark: Mark, section: str, key: str, problems: Problems) -> str:
    """The key of an argument where it is written, such as `dpo.beta`."""
    return problems.name_at(mark, of_key=True) or f"{section}.{key}"


def _chosen(path: KeyPath, name: Scalar, problems: Problems) -> tuple[Mark, str]:
    """Where it was decided which component a section names, and words that say so: where the name
    is written, or where null removes the call that trained a role without a backend of its own."""
    words = f"{dotted(path)} is {name.value}"
    if name.mark.is_default:
        for call, removed, mark in removed_calls(problems.written, ("graph",)):
            if (plain(removed).get("model"), plain(removed).get("call")) == (path[1], "train_step"):
                return mark, f"{words} because the call {call} is removed {place_of(mark)}"
    return name.mark, words


@dataclass
class _Takers:
    """The components that receive the arguments written at one place: several,
    if `${…}` passes them on."""

    number: int = 0
    legal: dict[str, None] = field(default_factory=dict)
    """The union of their arguments."""
    chosen: list[tuple[Mark, str]] = field(default_factory=list)
    """Where each of them was chosen, and words for it."""


def _takers(tree: MappingNode, problems: Problems) -> dict[Mark, _Takers]:
    """The components that receive each argument, by the place where the argument is written."""
    takers_of: dict[Mark, _Takers] = {}
    unknown: set[str] = set()
    for path, kind in component_paths(tree):
        name = at(tree, (*path, "type"))
        legal = _legal(kind, str(getattr(name, "value", "")))
        unknown |= {kind} if legal is None else set()
        chosen = [_chosen(path, name, problems)] if isinstance(name, Scalar) else []
        for entry in entries_at(tree, (*path, "args")).values():
            takers = takers_of.setdefault(entry.key, _Takers())
            takers.number += 1
            takers.legal |= dict.fromkeys(legal or ())
            takers.chosen += chosen
    components = [(kind, name) for kind in unknown for name in registry.names(kind)]
    meant = {argument: None for kind, name in components for argument in _legal(kind, name) or ()}
    for takers in takers_of.values():
        takers.legal |= meant if takers.number > 1 else {}
    return takers_of


def _legal(kind: str, name: str) -> tuple[str, ...] | None:
    """The arguments of a component; None if it is unknown, and may stand for any of its kind."""
    signature = known_signature(kind, name)
    return (
        tuple(argument.name for argument in signature.arguments) if signature is not None else None
    )


def _own(args: MappingNode, legal: Collection[str], takers: Mapping[Mark, _Takers]) -> MappingNode:
    """Of arguments passed to several components, those that this one accepts. One that no component
    accepts stays, to be refused."""
    others = {
        key
        for key, entry in args.entries.items()
        if key not in legal and key in takers[entry.key].legal
    }
    return replace(
        args, entries={key: entry for key, entry in args.entries.items() if key not in others}
    )


def _read(read: Callable[[], T], name: Scalar, problems: Problems) -> T | None:
    """What is read from the file of a component; None, with its fault reported where the recipe
    names the component."""
    try:
        return read()
    except (UnknownComponent, ProjectError) as error:
        message = f"{error.where}: {error.what}" if error.where else error.what
        problems.add(error.code, message, name.mark, error.hint)
        return None


@cache
def signature_of(kind: str, name: str) -> registry.Signature:
    """A component's signature. It is kept without looking whether files have changed,
    until `cache_clear`."""
    return registry.signature(kind, name)


def known_signature(kind: str, name: str) -> registry.Signature | None:
    """A component's signature; None if it cannot be read, which `check_components` reports."""
    try:
        return signature_of(kind, name)
    except UsageError:
        return None


def lacks_method(interface: str, method: str) -> bool:
    """Whether an interface is known not to have a method."""
    signature = known_signature("interfaces", interface)
    return (
        signature is not None and method not in signature.methods and not signature.has_unread_bases
    )


def has_method(kind: str, component: str, method: str) -> bool:
    """Whether a component is known to have an optional method."""
    signature = known_signature(kind, component)
    return signature is not None and method in signature.methods


def declared(kind: str, component: str, constant: str) -> Any:
    """A literal declared in a component's class, such as a dataset's KEYS;
    None if there is none."""
    signature = known_signature(kind, component)
    return signature.constants.get(constant) if signature is not None else None


def declared_of_call(constant: str, call: Call) -> DeclaredKeys | None:
    """What the call's interface declares in a constant such as READS for its method and arguments;
    None: nothing."""
    declaration = declared("interfaces", call.interface.type, constant)
    entries = declaration.get(call.call) if isinstance(declaration, dict) else None
    if not isinstance(entries, tuple | list) or not all(
        isinstance(entry, str) for entry in entries
    ):
        return None

    def argument(name: str) -> Any:
        value = argument_of("interfaces", call.interface.type, call.interface.args, name)
        if value is registry.COMPUTED:
            raise LookupError(name)
        return value

    try:
        return declared_keys(entries, argument)
    except ValueError:
        return None  # `rlcli test interface` reports it


def replaced_interfaces() -> dict[str, Mapping[str, Any]]:
    """Interface of an older format → what replaces it: the interface `by`,
    and what its `REPLACES` says."""
    return {
        older: {"by": name, **how}
        for name in registry.names("interfaces")
        for older, how in (declared("interfaces", name, "REPLACES") or {}).items()
    }


def dataset_keys(
    datasets: Mapping[str, Component], name: str | None, asking: tuple[str, ...] = ()
) -> tuple[str, ...] | None:
    """The keys in the rows of one of a recipe's datasets, given its arguments: the tuple `KEYS` in
    its class, or the keys of the datasets named by its argument `KEYS_OF`; None if not declared.
    `asking`: datasets made of this one."""
    if name is None or name in asking:
        return None
    dataset = datasets.get(name, Component(type=name))
    entries = declared("datasets", dataset.type, "KEYS")
    if isinstance(entries, tuple | list):
        try:
            return declared_keys(
                entries, lambda key: argument_of("datasets", dataset.type, dataset.args, key)
            ).needed
        except (ValueError, TypeError):
            return None  # `rlcli test dataset` reports it
    keys = [dataset_keys(datasets, source, (*asking, name)) for source in _made_of(dataset)]
    return keys[0] if keys and all(others == keys[0] for others in keys) else None


def holds_pairs(
    datasets: Mapping[str, Component], name: str, asking: tuple[str, ...] = ()
) -> bool | None:
    """Whether a row of one of a recipe's datasets is pairs of sequences, as `PAIRS` in its class,
    or in those of the datasets that it is made of, declares; None if it is not declared."""
    dataset = datasets.get(name, Component(type=name))
    argument = declared("datasets", dataset.type, "PAIRS")
    if argument is not None or name in asking:
        return None if argument is None else bool(argument)
    answers = {holds_pairs(datasets, source, (*asking, name)) for source in _made_of(dataset)}
    return answers.pop() if len(answers) == 1 else None


def _made_of(dataset: Component) -> list[str]:
    """The datasets that the argument `KEYS_OF` of a dataset names."""
    argument = declared("datasets", dataset.type, "KEYS_OF")
    named = argument_of("datasets", dataset.type, dataset.args, argument) if argument else None
    return [named] if isinstance(named, str) else list(map(str, named or ()))


def with_sources(datasets: Mapping[str, Component], name: str) -> tuple[str, ...]:
    """A dataset of the recipe, and those it is made of."""
    names: dict[str, None] = {}
    waiting = [name]
    while waiting:
        next_name = waiting.pop()
        if next_name in datasets and next_name not in names:
            names[next_name] = None
            waiting += sources_of(datasets[next_name])
    return tuple(names)


def sources_of(dataset: Component) -> tuple[str, ...]:
    """The datasets of the recipe that this one is made of:
    the keys of its mapping argument named by `KEYS_OF`."""
    argument = declared("datasets", dataset.type, "KEYS_OF")
    named = dataset.args.get(argument) if argument else None
    return tuple(map(str, named)) if isinstance(named, dict) else ()


def argument_of(kind: str, component: str, args: Mapping[str, Any], name: str) -> Any:
    """The value of a component's argument: given, or its default;
    None if there is no such argument."""
    if name in args:
        return args[name]
    argument = argument_named(kind, component, name)
    return argument.default if argument is not None else None


def argument_named(kind: str, component: str, name: str) -> registry.Argument | None:
    """An argument of a component; None if it has none of that name, or cannot be read."""
    signature = known_signature(kind, component)
    arguments = signature.arguments if signature is not None else ()
    return next((argument for argument in arguments if argument.name == name), None)
