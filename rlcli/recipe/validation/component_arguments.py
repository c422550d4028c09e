"""Checks the components that a recipe names, and their arguments,
against the signatures in their source."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from rlcli import registry
from rlcli.errors import ProjectError, UnknownComponent
from rlcli.recipe.components import known_signature, replaced_interfaces, signature_of
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
    dotted,
    entries_at,
    kind_of,
    plain,
    with_value,
)
from rlcli.recipe.validation.unresolved import Unresolved
from rlcli.recipe.validation.validate import check_against

T = TypeVar("T")


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
