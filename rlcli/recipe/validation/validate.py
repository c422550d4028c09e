"""Validates a tree against a pydantic model: every mismatch at once,
each where its value is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlcli.recipe.annotations import annotation_at, fields_of, section_of, stand_in
from rlcli.recipe.launch_section import FORMATS
from rlcli.recipe.parsing.merge import whole_reference
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import (
    COMMAND_LINE,
    Entry,
    KeyPath,
    MappingNode,
    Mark,
    Node,
    Scalar,
    at,
    default_mark,
    dotted,
    is_null,
    key_mark,
    keys_at,
    kind_of,
    leaves,
    nearest,
    node_of,
    nodes,
    plain,
    with_entry,
    with_value,
    without,
)
from rlcli.recipe.schema import SECTIONS
from rlcli.recipe.suggest import suggest_key
from rlcli.recipe.synonyms import called_here, translated, word_here
from rlcli.recipe.validation.unresolved import Unresolved
from rlcli.spelling import did_you_mean, misspelt, nearest_name

M = TypeVar("M", bound=BaseModel)

TRAINED_ROLE = "actor"
"""The role that every built-in recipe trains."""

MAX_REPAIRS = 12
MAX_ERRORS = 200
"""With more errors than this a text is not a recipe with mistakes: the first few are reported,
nothing is repaired."""
FEW = 40

_EXPECTED = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "string": "text",
    "dict": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
    "mapping": "a mapping",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "none": "null",
}


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
    checker = _Checker(model, problems, unresolved, prefix, top, component)
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
    path: KeyPath = tuple(key for key in error["loc"] if key != "[key]")
    while error["type"] != "missing" and path and at(tree, path) is None:
        path = path[:-1]
    return path


@dataclass
class _Checker:
    """Reports pydantic's errors in terms of recipes, and removes their causes from the tree."""

    model: type[BaseModel]
    problems: Problems
    unresolved: Unresolved
    prefix: KeyPath
    top: list[str]
    component: str | None = None

    def add(self, code: str, message: str, path: KeyPath, mark: Mark, **details: Any) -> None:
        """Report a problem with the keys around a path."""
        section = str((*self.prefix, *path, "")[0])
        about = self.component or (section if section in SECTIONS else None)
        full_path = (*self.prefix, *path)
        self.problems.add(code, message, mark, about=about, section=full_path, **details)

    @property
    def roles(self) -> list[str]:
        """The names of the recipe's roles, if it got that far."""
        return keys_at(self.problems.written, ("models",))

    @cached_property
    def words(self) -> dict[str, str]:
        """Other frameworks' names for arguments of the recipe's interfaces."""
        from rlcli.recipe.validation.argument_words import argument_words

        return argument_words(self.problems.written)

    def note_all(self, by_path: Mapping[KeyPath, Sequence[Any]], tree: MappingNode) -> None:
        """Report what pydantic says about values, by their paths."""
        if foreign := self.foreign_keys(by_path, tree):
            self.note_foreign(foreign, tree)
            return
        for path, errors in by_path.items():
            self.note(errors, tree, path)
        self.note_missing([path for path in by_path if _is_missing(by_path[path])], tree)

    def foreign_keys(
        self, by_path: Mapping[KeyPath, Sequence[Any]], tree: MappingNode
    ) -> dict[str, str]:
        """The keys of other tools, with ours for them, in a recipe that has no section of ours that
        is required, because it extends nothing; empty for any other recipe."""
        lacks = {
            path[0] for path, errors in by_path.items() if len(path) == 1 and _is_missing(errors)
        }
        required = {name for name, field in self.model.model_fields.items() if field.is_required()}
        if self.prefix or "extends" in tree.entries or lacks != required - {"name"}:
            return {}
        unknown = [str(path[0]) for path in by_path if path[0] not in self.top]
        ours = {key: translated([key], self.words, [TRAINED_ROLE]) for key in unknown}
        return {key: name for key, name in ours.items() if name is not None}

    def note_foreign(self, ours: Mapping[str, str], tree: MappingNode) -> None:
        """Report a recipe in the words of another tool as one problem."""
        from rlcli.recipe.parsing.layers import whole_recipe_names

        values = [getattr(tree.get(key), "value", None) for key in ours if ours[key] == "extends"]
        bases = [value for value in values if value in whole_recipe_names()]
        base = bases[0] if bases else "NAME (rlcli ls lists the recipes)"
        advice = [f"begin with extends: {base}"]
        advice += [
            f"write {name} instead of {key}" for key, name in ours.items() if name != "extends"
        ]
        message = f"the recipe extends nothing and has another tool's keys: {', '.join(ours)}"
        mark = key_mark(tree, (next(iter(ours)),)) or tree.mark
        self.add("R42", message, (), mark, hint="; ".join(advice))

    def note(self, errors: Sequence[Any], tree: MappingNode, path: KeyPath) -> None:
        """Report what pydantic says about the value at a path;
        several errors are the members of one union."""
        error, full_path = errors[0], (*self.prefix, *path)
        if error["type"] == "extra_forbidden":
            self.note_unknown(tree, path)
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
            full_path = (*self.prefix, *path)
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
        message = f"{dotted((*self.prefix, *section, first))} is required"
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
        return did_you_mean(str(path[-1]), others, f"there is {', '.join(others) or 'none'}")

    def note_spelling(self, error: Any, tree: MappingNode, path: KeyPath) -> None:
        """Report a name, or another text of a given form, that is not written as it must be."""
        is_key = "[key]" in error["loc"]
        mark = (key_mark(tree, path) if is_key else None) or nearest(tree, path).mark
        word = path[-1] if is_key else getattr(at(tree, path), "value", "")
        if (form := FORMATS.get(error.get("ctx", {}).get("pattern"))) is not None and not is_key:
            self.problems.add(
                "R37", f"{dotted((*self.prefix, *path))} cannot be {word!r}", mark, form
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
        inner = [dropped for dropped in self.unresolved.values if dropped[: len(path)] == path]
        names = {str(dropped[len(path)]) for dropped in inner}
        return any(word in names for word in words)

    def note_unknown(self, tree: MappingNode, path: KeyPath) -> None:
        """Report an unknown key; if a whole section of another framework was pasted, key by key."""
        from rlcli.recipe.validation.argument_words import advice_on, key_as_argument

        full_path, node = (*self.prefix, *path), at(tree, path)
        if (advice := advice_on(self.problems.written, str(path[-1]))) is not None:
            self.note_key("R42", path, tree, advice)
            return
        if home := key_as_argument(self.problems.written, full_path[:-1], str(path[-1])):
            self.note_key("R43", path, tree, f"did you mean {home}?")
            return
        if (full_path[0], path[-1]) == ("datasets", "path"):
            text = getattr(node, "value", None) or "FILE"
            self.note_key("R43", path, tree, f"to read a file: {_rows_of(full_path[1], text)}")
            return
        section = section_of(annotation_at(self.model, path[:-1]))
        legal = self.top if len(path) == 1 else list(fields_of(section)) if section else []
        foreign = (
            [inner for inner, _ in leaves(node) if inner] if isinstance(node, MappingNode) else []
        )
        meant = {
            inner: translated(map(str, (*full_path, *inner)), self.words, self.roles)
            for inner in foreign
        }
        homes = self.written_homes(path, key_mark(tree, path))
        is_call = dotted(("graph", *path)) in homes
        if any(meant.values()) and not is_call and misspelt(str(path[-1]), legal) is None:
            for inside, target in meant.items():
                advice = called_here(dotted((*path, *inside)[-2:]), target) if target else None
                self.note_key("R42", (*path, *inside), tree, advice)
            return
        code, hint = suggest_key(
            str(path[-1]), legal, self.words, full_path[:-1], self.roles, homes
        )
        self.note_key(code, path, tree, hint)

    def written_homes(self, path: KeyPath, mark: Mark | None) -> list[str]:
        """Where else in the recipe a key of that name belongs to an interface, or is written: in a
        role, a call, or a block's argument. `mark`: the place of this one, from where a reference
        may have carried it."""
        from rlcli.recipe.validation.argument_words import argument_homes

        if self.prefix[-2:] == ("interface", "args") and (
            homes := argument_homes(self.problems.written, str(path[-1]))
        ):
            return homes
        namesakes = (
            home for home, _ in nodes(self.problems.written) if home and home[-1] == path[-1]
        )
        written = [
            home
            for home in namesakes
            if mark is None or key_mark(self.problems.written, home) != mark
        ]
        in_sections = [
            home for home in written if len(home) > 1 and all(isinstance(key, str) for key in home)
        ]
        in_sections.sort(key=len)
        return [dotted(home) for home in in_sections if home != (*self.prefix, *path)]

    def note_key(self, code: str, path: KeyPath, tree: MappingNode, hint: str | None) -> None:
        key = str(path[-1])
        mark = key_mark(tree, path) or nearest(tree, path).mark
        name = self.problems.name_at(mark, of_key=True) or dotted((*self.prefix, *path))
        details: dict[str, Any] = {"hint": hint, "width": len(key), "same": key}
        self.add(code, f"unknown key {name}", path if path[1:] else (), mark, **details)

    def note_value(self, errors: Sequence[Any], tree: MappingNode, path: KeyPath) -> None:
        node, error = at(tree, path), errors[0]
        assert node is not None
        user, written = self.user_of(path), self.problems.name_at(node.mark)
        name = (written if user is None else None) or dotted((*self.prefix, *path)) or "the recipe"
        code, fault, advice = (
            _describe(error, node, name)
            if len(errors) == 1
            else _describe_union(errors, node, name)
        )
        if code == "R37" and advice is None and isinstance(node, Scalar):
            advice = _path_hint((*self.prefix, *path), str(node.value))
        mark = node.mark
        if user is not None and self.problems.has_problem_at(mark):
            return
        if user is not None:
            mark, fault = (
                user.mark,
                f"{fault}, which it takes from {written or user.text} ({node.mark})",
            )
        elif isinstance(node, MappingNode) and (entry := _blamed(error, node)) is not None:
            mark = node.entries[entry].node.mark
        same = name.rpartition(".")[2] if path else None
        self.add(code, fault, path, mark, hint=advice, same=same)

    def user_of(self, path: KeyPath) -> Scalar | None:
        """Where the reference `${…}` is written that is itself the value at a path;
        None if it came another way."""
        written = at(self.problems.written, (*self.prefix, *path))
        return (
            written
            if isinstance(written, Scalar) and whole_reference(written) is not None
            else None
        )

    def repaired(self, errors: Sequence[Any], tree: MappingNode, path: KeyPath) -> MappingNode:
        """The tree without the faults at a path."""
        error, full_path = errors[0], (*self.prefix, *path)
        if error["type"] == "missing":
            self.unresolved.values.add(full_path)
            return self.with_stand_in(tree, path)
        if error["type"] == "extra_forbidden":
            self.unresolved.lacking.add(full_path[:-1])
            return without(tree, path)
        if "[key]" in error["loc"]:
            self.unresolved.values.add(full_path[:-1])
        node = at(tree, path)
        blamed = _blamed(error, node) if isinstance(node, MappingNode) else None
        local = Unresolved()
        tree = local.drop_from(tree, (*path, blamed) if blamed else path)
        self.unresolved.values |= {(*self.prefix, *dropped) for dropped in local.values}
        return tree

    def with_stand_in(self, tree: MappingNode, path: KeyPath) -> MappingNode:
        """The tree with a stand-in for a missing required key."""
        above, mark = at(tree, path[:-1]), default_mark()
        if not isinstance(above, MappingNode):
            return tree
        value = node_of(stand_in(annotation_at(self.model, path)), mark)
        return with_value(tree, path[:-1], with_entry(above, path[-1:], Entry(mark, value)))


def _blamed(error: Any, node: MappingNode) -> str | None:
    """The key that a section's own check names first, if a layer sets it."""
    if error["type"] != "value_error":
        return None
    named = re.match(r"\w+", str(error["ctx"]["error"]))
    return named.group() if named and named.group() in node.entries else None


def _describe_union(errors: Sequence[Any], node: Node, name: str) -> tuple[str, str, str | None]:
    """Like `_describe`, for a field that may have several types, none of which fits."""
    words = []
    for error in errors:
        if error["type"] == "literal_error":
            words.append(error["ctx"]["expected"])
        elif (expected := _EXPECTED.get(error["type"].split("_")[0])) is not None:
            words.append(expected)
        else:
            return _describe(error, node, name)
    text = f" {node.text!r}" if isinstance(node, Scalar) and node.text else ""
    fault = f"{name} must be {' or '.join(dict.fromkeys(words))}, found {kind_of(node)}{text}"
    return "R37", fault, None


def _describe(error: Any, node: Node, name: str) -> tuple[str, str, str | None]:
    """(message id, fault, hint) for a value that does not fit its field."""
    kind = error["type"]
    text = f" {node.text!r}" if isinstance(node, Scalar) and node.text else ""
    if kind == "value_error":
        return "R49", f"{name}: {error['ctx']['error']}", None
    if kind == "literal_error":
        legal = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        word = str(node.value) if isinstance(node, Scalar) else ""
        near = word_here(word, legal) or nearest_name(word, legal)
        fault = f"{name} is{text or ' ' + kind_of(node)}; it must be {error['ctx']['expected']}"
        return "R37", fault, f"did you mean {near}?" if near else None
    expected = _EXPECTED.get(kind.split("_")[0])
    if expected is not None and re.search(
        r"_(type|parsing|from_float|attributes_type|exact_type)$", kind
    ):
        if is_null(node):
            return "R39", f"{name} is required: {expected}, found null", None
        return (
            "R37",
            f"{name} must be {expected}, found {kind_of(node)}{text}",
            _type_hint(expected, node),
        )
    if kind == "string_too_long":
        length, most = len(str(getattr(node, "value", ""))), error["ctx"]["max_length"]
        return "R35", f"{name} has {length} characters; it may have at most {most}", None
    bound = error["msg"].removeprefix("Input should be ")
    for written, shorter in _BOUNDS.items():
        bound = bound.replace(written, shorter)
    is_number = isinstance(node, Scalar) and isinstance(node.value, int | float)
    value = f" {node.text}" if isinstance(node, Scalar) and is_number else text
    return "R35", f"{name} is{value or ' ' + kind_of(node)}; it must be {bound}", None


_BOUNDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
"""Pydantic's words → ours."""


def _rows_of(dataset: str | int, file: str) -> str:
    """The override with which a dataset reads a file."""
    return f"'datasets.{dataset}={{type: hf, args: {{path: {file}}}}}'"


def _path_hint(path: KeyPath, text: str) -> str | None:
    """What to write where a role, or the datasets, are given as a single text: probably a path."""
    if path == ("datasets",):
        return f"to train on other rows: {_rows_of('train', text)}"
    if len(path) == 2 and path[0] == "models":
        return f"to start from other weights: {dotted(path)}.path={text}"
    return None


def _type_hint(expected: str, node: Node) -> str | None:
    if not isinstance(node, Scalar):
        return None
    word = node.text.lower()
    if word in ("none", "nil", "nothing") or (expected == "a mapping" and node.value is False):
        return "write null"
    if expected == "bool":
        return "only true and false are booleans"
    if expected == "int" and isinstance(node.value, float) and node.value == int(node.value):
        return f"write {int(node.value)}"
    if (
        expected in ("int", "float")
        and isinstance(node.value, str)
        and word.replace("_", "").replace(",", "").isdigit()
    ):
        return f"write {word.replace('_', '').replace(',', '')}" + (
            "" if node.plain else " without quotes"
        )
    return None
