"""Checks the components that a recipe names, and their arguments,
against the signatures in their source."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rlcli import registry
from rlcli.errors import ProjectError, UnknownComponent
from rlcli.recipe.components import known_signature, replaced_interfaces, signature_of
from rlcli.recipe.parsing.places import component_paths
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.removal import without_removed
from rlcli.recipe.parsing.tree import (
    KeyPath,
    MappingNode,
    Mark,
    Node,
    Scalar,
    at,
    dotted,
    kind_of,
    with_value,
)
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.validation.shared_arguments import Takers, refuse_replaced, takers_by_mark
from rlcli.recipe.validation.validate import check_against

T = TypeVar("T")


def check_components(tree: MappingNode, problems: Problems, unresolved: Unresolved) -> MappingNode:
    """Check every named component. Returns the tree, with arguments converted to their types."""
    takers = takers_by_mark(tree, problems)
    refuse_replaced(takers, problems)
    checks = _Checks(takers, problems, unresolved)
    for path, kind in component_paths(tree):
        node = at(tree, path)
        name = _name_of(node, kind) if isinstance(node, MappingNode) else None
        if name is None:
            continue
        if at(tree, (*path, "type")) is not name:
            tree = with_value(tree, (*path, "type"), name)
        if not unresolved.about((*path, "type")):
            tree = checks.of_component(tree, path, kind, name)
    return tree


@dataclass(frozen=True)
class _Checks:
    """Checks arguments, and collects what is wrong with them."""

    takers: Mapping[Mark, Takers]
    problems: Problems
    unresolved: Unresolved

    def of_component(
        self, tree: MappingNode, path: KeyPath, kind: str, name: Scalar
    ) -> MappingNode:
        """The tree, with the arguments of one component checked."""
        signature = _readable_signature(kind, name, self.problems)
        if signature is None:
            self.unresolved.values.add((*path, "type"))
            return tree
        written = at(tree, (*path, "args"))
        args = written or MappingNode({}, name.mark)
        if not isinstance(args, MappingNode):
            section = self.problems.name_at(args.mark) or dotted((*path, "args"))
            message = f"{section} must be a mapping, found {kind_of(args)}"
            self.problems.add("R37", message, args.mark, hint=_missing_space(args))
            return self.unresolved.drop_from(tree, (*path, "args"))
        checked = self._of_arguments(args, signature, name, path)
        if checked is None or written is None:
            return tree
        return with_value(tree, (*path, "args"), checked)

    def _of_arguments(
        self, args: MappingNode, signature: registry.Signature, name: Scalar, path: KeyPath
    ) -> MappingNode | None:
        """The arguments, converted to their types; None if there are none to check, or what they
        must be cannot be read."""
        if not args.entries and not any(argument.required for argument in signature.arguments):
            return None
        legal = tuple(argument.name for argument in signature.arguments)
        args = _own(args, legal, self.takers)
        model = _read(partial(signature.model, only=args.entries), name, self.problems)
        if model is None:
            return None
        args = without_removed(model, args, self.problems, prefix=(*path, "args"))
        args = self._without_leftovers(args, legal, path)
        unknown = [entry.key for key, entry in args.entries.items() if key not in legal]
        elsewhere = [argument for mark in unknown for argument in self.takers[mark].legal]
        checked = check_against(
            model,
            args,
            self.problems,
            self.unresolved,
            prefix=(*path, "args"),
            legal=tuple(dict.fromkeys([*legal, *elsewhere])),
            component=signature.name,
        )
        return checked.tree

    def _without_leftovers(
        self, args: MappingNode, legal: Collection[str], path: KeyPath
    ) -> MappingNode:
        """Drop the arguments that layers wrote for another component, before a later layer chose
        this one, or one that the arguments are shared with. Those of built-in layers vanish with
        it; the user's are refused, as one problem."""
        left: dict[str, Mark] = {}
        refused: dict[str, str] = {}
        for key, entry in args.entries.items():
            chosen = self.takers[entry.key].chosen
            later = [words for mark, words in chosen if self.problems.is_below(entry.key, mark)]
            if later and key not in legal:
                left[key] = entry.key
                if not self.problems.is_built_in(entry.key):
                    refused[key] = later[0]
        remaining = args.without_keys(left)
        if refused:
            marks = {key: left[key] for key in refused}
            are_all = not remaining.entries
            _refuse_leftovers(refused, marks, (*path, "args"), are_all, self.problems)
        return remaining


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


def _refuse_leftovers(
    chosen: Mapping[str, str],
    marks: Mapping[str, Mark],
    path: KeyPath,
    are_all: bool,
    problems: Problems,
) -> None:
    """Report arguments that a component does not have. `chosen`: their names, with words for where
    the component was chosen; `are_all`: whether it has no others."""
    first, section = next(iter(chosen)), dotted(path)
    message = f"{chosen[first]}; it has no argument {' or '.join(chosen)}"
    names = [_name_written(mark, section, key, problems) for key, mark in marks.items()]
    if are_all and all(name.startswith(f"{section}.") for name in names):
        names = [section]
    drop = " ".join(f"{name}=null" for name in names)
    hint = f"remove what it does not have: {drop}"
    problems.add("R71", message, marks[first], hint, section=path)


def _name_written(mark: Mark, section: str, key: str, problems: Problems) -> str:
    """The key of an argument where it is written, such as `dpo.beta`."""
    return problems.name_at(mark, of_key=True) or f"{section}.{key}"


def _own(args: MappingNode, legal: Collection[str], takers: Mapping[Mark, Takers]) -> MappingNode:
    """Of arguments passed to several components, those that this one accepts. One that no component
    accepts stays, to be refused."""
    others = [
        key
        for key, entry in args.entries.items()
        if key not in legal and key in takers[entry.key].legal
    ]
    return args.without_keys(others)


def _read(read: Callable[[], T], name: Scalar, problems: Problems) -> T | None:
    """What is read from the file of a component; None, with its fault reported where the recipe
    names the component."""
    try:
        return read()
    except (UnknownComponent, ProjectError) as error:
        message = f"{error.where}: {error.what}" if error.where else error.what
        problems.add(error.code, message, name.mark, error.hint)
        return None
