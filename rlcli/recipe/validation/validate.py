"""Validates a tree against a pydantic model: every mismatch at once,
each where its value is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlcli.recipe.parsing.merge import whole_reference
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import (
    COMMAND_LINE,
    Entry,
    KeyPath,
    MappingNode,
    Node,
    Scalar,
    at,
    default_mark,
    dotted,
    is_within,
    key_mark,
    keys_at,
    nearest,
    node_of,
    plain,
    value_at,
    with_entry,
    with_value,
    without,
)
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.schema_types import annotation_at, fields_of, stand_in
from rlcli.recipe.sections.launch import FORMATS
from rlcli.recipe.validation.checked_section import CheckedSection
from rlcli.recipe.validation.unknown_keys import foreign_keys, note_foreign, note_unknown
from rlcli.recipe.validation.value_messages import Misfit, describe, path_hint
from rlcli.spelling import name_instead

M = TypeVar("M", bound=BaseModel)

MAX_REPAIRS = 12
MAX_ERRORS = 200
"""With more errors than this a text is not a recipe with mistakes: the first few are reported,
nothing is repaired."""
FEW = 40


@dataclass(frozen=True)
class CheckedTree:
    """The outcome. Whatever did not fit was reported, dropped or replaced by a stand-in,
    and is unresolved."""

    tree: MappingNode
    """The tree, with text where it is expected."""
    value: Any
    """The model; None only if not even stand-ins fit."""


def check_against(
    model: type[BaseModel],
    tree: MappingNode,
    problems: Problems,
    unresolved: Unresolved,
    prefix: KeyPath = (),
    blocks: Iterable[str] = (),
    legal: Iterable[str] = (),
    component: str | None = None,
) -> CheckedTree:
    """Validate `tree`; `prefix` is its path in the recipe, for messages. `legal`: keys allowed at
    its top, if the model does not have them all; `blocks`: the recipe's own; `component`: the one
    whose arguments these are."""
    top = [*(legal or fields_of(model)), *sorted(blocks)]
    top = top if prefix else ["extends", *top]
    checker = _Checker(model, problems, prefix, top, component, unresolved)
    for _ in range(MAX_REPAIRS):
        tree, errors, value = _validated(model, tree)
        if not errors:
            return CheckedTree(tree, value)
        too_many = len(errors) > MAX_ERRORS
        if too_many:
            problems.unlisted += len(errors) - FEW
            errors = errors[:FEW]
        by_path = _by_path(errors, tree)
        checker.note_all(by_path, tree)
        if too_many:
            problems.is_cut_off = True
            break
        for path, group in by_path.items():
            tree = checker.repaired(group, tree, path)
    return CheckedTree(tree, None)


def _by_path(errors: Iterable[Any], tree: Node) -> dict[KeyPath, list[Any]]:
    by_path: dict[KeyPath, list[Any]] = {}
    for error in errors:
        by_path.setdefault(_tree_path(error, tree), []).append(error)
    return by_path


def _is_missing(errors: Sequence[Any]) -> bool:
    return bool(errors[0]["type"] == "missing")


def _validated(model: type[M], tree: MappingNode) -> tuple[MappingNode, list[Any], M | None]:
    """Validate; where a field of type str got an unquoted `1.10`,
    give it the text and validate again."""
    while True:
        try:
            return tree, [], model.model_validate(plain(tree))
        except ValidationError as error:
            errors = error.errors(include_url=False)
        texts = 0
        if len(errors) > MAX_ERRORS:
            return tree, errors, None
        for item in errors:
            path = _tree_path(item, tree)
            node = at(tree, path)
            wants_text = item["type"] == "string_type" and isinstance(node, Scalar)
            if (
                wants_text
                and isinstance(node, Scalar)
                and node.plain
                and not isinstance(node.value, str | None)
            ):
                tree = with_value(tree, path, replace(node, value=node.text, plain=False))
                texts += 1
        if not texts:
            return tree, errors, None


def _tree_path(error: Any, tree: Node) -> KeyPath:
    """Path of an error, without the union member that pydantic tried,
    and without its marker for keys."""
    path = tuple(key for key in error["loc"] if key != "[key]")
    while error["type"] != "missing" and path and at(tree, path) is None:
        path = path[:-1]
    return path


@dataclass
class _Checker(CheckedSection):
    """Reports pydantic's errors in terms of recipes, and removes their causes from the tree."""

    unresolved: Unresolved

    def note_all(self, by_path: Mapping[KeyPath, Sequence[Any]], tree: MappingNode) -> None:
        """Report what pydantic says about values, by their paths."""
        if foreign := foreign_keys(self, by_path, tree):
            note_foreign(self, foreign, tree)
            return
        for path, errors in by_path.items():
            self.note(errors, tree, path)
        self.note_missing([path for path in by_path if _is_missing(by_path[path])], tree)

    def note(self, errors: Sequence[Any], tree: MappingNode, path: KeyPath) -> None:
        """Report what pydantic says about the value at a path;
        several errors are the members of one union."""
        error, full_path = errors[0], self.in_recipe(path)
        if error["type"] == "extra_forbidden":
            note_unknown(self, tree, path)
        elif "[key]" in error["loc"] or error["type"] == "string_pattern_mismatch":
            self.note_spelling(error, tree, path)
        elif not _is_missing(errors) and not (
            error["type"] == "value_error" and self.rests_on_doubt(error, full_path)
        ):
            self.note_value(errors, tree, path)

    def note_missing(self, paths: Iterable[KeyPath], tree: MappingNode) -> None:
        """Report the required keys that are missing, as one problem of each section. That of the
        arguments of a component is one problem, even if a reference carries it to several calls."""
        sections: dict[KeyPath, list[str]] = {}
        for path in paths:
            full_path = self.in_recipe(path)
            if (
                not self.unresolved.about(full_path)
                and full_path[:-1] not in self.unresolved.lacking
            ):
                sections.setdefault(path[:-1], []).append(str(path[-1]))
        for section, names in sections.items():
            self.note_lacking(section, names, tree)

    def note_lacking(self, section: KeyPath, names: Sequence[str], tree: MappingNode) -> None:
        """Report the required keys that a section lacks."""
        first, *others = names
        message = f"{dotted(self.in_recipe((*section, first)))} is required"
        if others:
            message += f", and so {'are' if others[1:] else 'is'} {', '.join(others)}"
        mark, same = nearest(tree, (*section, first)).mark, f"lacks {first} {others}"
        is_data = self.prefix[:1] == ("datasets",) and first == "path"
        hint = self.names_beside(tree, section)
        hint = "set it with --data or in the recipe" if is_data else hint
        if not (self.prefix or section or "extends" in tree.entries):
            hint = "most recipes start from another one: extends: NAME; rlcli ls lists them"
        self.add("R39", message, section, mark, hint=hint, same=same)

    def names_beside(self, tree: MappingNode, path: KeyPath) -> str | None:
        """The hint for a role, dataset or call that only the command line names: probably an
        existing one was meant."""
        mark = key_mark(tree, path) if path else None
        if self.prefix or len(path) != 2 or mark is None or mark.file != COMMAND_LINE:
            return None
        others = [name for name in keys_at(tree, path[:-1]) if name != path[-1]]
        return name_instead(str(path[-1]), others)

    def note_spelling(self, error: Any, tree: MappingNode, path: KeyPath) -> None:
        """Report a name, or another text of a given form, that is not written as it must be."""
        is_key = "[key]" in error["loc"]
        mark = (key_mark(tree, path) if is_key else None) or nearest(tree, path).mark
        word = path[-1] if is_key else value_at(tree, path)
        if (form := FORMATS.get(error.get("ctx", {}).get("pattern"))) is not None and not is_key:
            self.problems.add(
                "R37", f"{dotted(self.in_recipe(path))} cannot be {word!r}", mark, form
            )
            return
        signs = "'_' or '-'" if is_key else "'.', '_' or '-'"
        hint = form or f"use up to 64 letters, digits, {signs}, starting with a letter or digit"
        self.problems.add("R68", f"invalid name {word!r}", mark, hint)

    def rests_on_doubt(self, error: Any, path: KeyPath) -> bool:
        """Whether a section's own check names a dropped value, or concerns nothing else."""
        if self.unresolved.about(path):
            return True
        words = re.findall(r"\w+", str(error["ctx"]["error"]))
        inner = [dropped for dropped in self.unresolved.values if is_within(dropped, path)]
        names = {str(dropped[len(path)]) for dropped in inner}
        return any(word in names for word in words)

    def note_value(self, errors: Sequence[Any], tree: MappingNode, path: KeyPath) -> None:
        node, error = at(tree, path), errors[0]
        assert node is not None
        user, written = self.user_of(path), self.problems.name_at(node.mark)
        if user is not None and self.problems.has_problem_at(node.mark):
            return
        full_path = self.in_recipe(path)
        name = (written if user is None else None) or dotted(full_path) or "the recipe"
        code, fault, advice = _described(errors, node, name, full_path)
        mark = nearest(node, _blamed(error, node)).mark
        if user is not None:
            mark = user.mark
            fault = f"{fault}, which it takes from {written or user.text} ({node.mark})"
        same = name.rpartition(".")[2] if path else None
        self.add(code, fault, path, mark, hint=advice, same=same)

    def user_of(self, path: KeyPath) -> Scalar | None:
        """Where the reference `${…}` is written that is itself the value at a path;
        None if it came another way."""
        written = at(self.problems.written, self.in_recipe(path))
        return (
            written
            if isinstance(written, Scalar) and whole_reference(written) is not None
            else None
        )

    def repaired(self, errors: Sequence[Any], tree: MappingNode, path: KeyPath) -> MappingNode:
        """The tree without the faults at a path."""
        error, full_path = errors[0], self.in_recipe(path)
        if error["type"] == "missing":
            self.unresolved.values.add(full_path)
            return self.with_stand_in(tree, path)
        if error["type"] == "extra_forbidden":
            self.unresolved.lacking.add(full_path[:-1])
            return without(tree, path)
        if "[key]" in error["loc"]:
            self.unresolved.values.add(full_path[:-1])
        local = Unresolved()
        tree = local.drop_from(tree, (*path, *_blamed(error, at(tree, path))))
        self.unresolved.values |= set(map(self.in_recipe, local.values))
        return tree

    def with_stand_in(self, tree: MappingNode, path: KeyPath) -> MappingNode:
        """The tree with a stand-in for a missing required key."""
        above, mark = at(tree, path[:-1]), default_mark()
        if not isinstance(above, MappingNode):
            return tree
        value = node_of(stand_in(annotation_at(self.model, path)), mark)
        return with_value(tree, path[:-1], with_entry(above, path[-1:], Entry(mark, value)))


def _described(errors: Sequence[Any], node: Node, name: str, path: KeyPath) -> Misfit:
    """The fault of a value that does not fit its field, such as that of a file."""
    code, fault, advice = describe(errors, node, name)
    if code == "R37" and advice is None and isinstance(node, Scalar):
        advice = path_hint(path, str(node.value))
    return code, fault, advice


def _blamed(error: Any, node: Node | None) -> tuple[str, ...]:
    """The path within a section of the key that its own check names first, if a layer sets it."""
    if error["type"] != "value_error" or not isinstance(node, MappingNode):
        return ()
    named = re.match(r"\w+", str(error["ctx"]["error"]))
    return (named.group(),) if named and named.group() in node.entries else ()
