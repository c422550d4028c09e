"""A tree against a pydantic model: every mismatch at once, each at the place where the value is written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rlcli.recipe.problems import Problems
from rlcli.recipe.suggest import close_to, sections_in, suggest_key
from rlcli.recipe.tree import (
    Mapping,
    Node,
    Path,
    Scalar,
    at,
    dotted,
    key_mark,
    kind_of,
    nearest,
    plain,
    with_value,
)

M = TypeVar("M", bound=BaseModel)

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
}


class Checked:
    """The outcome: the tree with text where that is wanted, the object, where keys were unknown."""

    def __init__(self, tree: Node, value: Any, unknown_in: set[Path]):
        self.tree = tree
        self.value = value
        """The validated model, or None if something besides unknown keys is wrong."""
        self.unknown_in = unknown_in
        """Paths of the mappings that held unknown keys: they may lack what those were meant to be."""


def check_against(
    model: type[BaseModel], tree: Node, problems: Problems, prefix: Path = (), blocks: Iterable[str] = ()
) -> Checked:
    """Validate `tree`; `prefix` is its path in the recipe, for the messages."""
    tree, errors, value = _validated(model, tree)
    unknown_in: set[Path] = set()
    for error in errors:
        path = _tree_path(error["loc"])
        if error["type"] == "extra_forbidden":
            _note_unknown(model, tree, path, problems, prefix, blocks)
            unknown_in.add((*prefix, *path[:-1]))
        else:
            _note(error, tree, path, problems, prefix)
    if unknown_in:
        for error in errors:
            if error["type"] == "extra_forbidden":
                tree = with_value(tree, _tree_path(error["loc"]), None)
        tree, errors, value = _validated(model, tree)
    return Checked(tree, value, unknown_in)


def _validated(model: type[M], tree: Node) -> tuple[Node, list[Any], M | None]:
    """Validate; where a field of type str met an unquoted `1.10`, give it the text and validate again."""
    while True:
        try:
            return tree, [], model.model_validate(plain(tree))
        except ValidationError as error:
            errors = error.errors(include_url=False)
        texts = 0
        for item in errors:
            path = _tree_path(item["loc"])
            node = at(tree, path)
            wants_text = item["type"] == "string_type" and isinstance(node, Scalar)
            if wants_text and isinstance(node, Scalar) and node.plain and not isinstance(node.value, str | None):
                tree = with_value(tree, path, replace(node, value=node.text, plain=False))
                texts += 1
        if not texts:
            return tree, errors, None


def _tree_path(location: tuple[int | str, ...]) -> Path:
    return tuple(part for part in location if part != "[key]")


def _note_unknown(
    model: type[BaseModel], tree: Node, path: Path, problems: Problems, prefix: Path, blocks: Iterable[str]
) -> None:
    key = str(path[-1])
    section = _model_at(model, path[:-1])
    legal = list(_fields(section)) if section else []
    if not prefix and len(path) == 1:
        legal = ["extends", *legal, *blocks]
    code, hint = suggest_key(key, legal, blocks)
    what = f"unknown key {dotted((*prefix, *path))}"
    mark = key_mark(tree, path) or nearest(tree, path).mark
    problems.add(code, what, mark, hint, width=len(key), same=key)


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model that a path leads to; a name in a dict of sections, or an index, leads no deeper."""
    current: type[BaseModel] | None = model
    for part in path:
        if current is None:
            return None
        field = _fields(current).get(str(part))
        if field is not None:
            inner = sections_in(field.annotation)
            current = inner[0] if inner else None
    return current


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys that a model takes; a field may go by an alias."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _note(error: Any, tree: Node, path: Path, problems: Problems, prefix: Path) -> None:
    node = at(tree, path)
    name = dotted((*prefix, *path)) or "the recipe"
    if "[key]" in error["loc"] or error["type"] == "string_pattern_mismatch":
        mark = key_mark(tree, path) if "[key]" in error["loc"] else None
        word = path[-1] if "[key]" in error["loc"] else getattr(node, "value", "")
        what = f"{word!r} is no legal name"
        hint = "letters, digits and . _ - (at most 64), beginning with a letter or digit"
        problems.add("R68", what, mark or nearest(tree, path).mark, hint)
        return
    if error["type"] == "missing" or node is None:
        problems.add("R39", f"{name} is required", nearest(tree, path).mark)
        return
    code, what, advice = _describe(error, node, name)
    mark = node.mark
    if error["type"] == "value_error" and isinstance(node, Mapping):
        named = re.match(r"\w+", str(error["ctx"]["error"]))
        entry = node.entries.get(named.group()) if named else None
        mark = entry.node.mark if entry else mark
    problems.add(code, what, mark, advice, same=str(path[-1]) if path else None)


def _describe(error: Any, node: Node, name: str) -> tuple[str, str, str | None]:
    """(message id, what is wrong, hint) for a value that does not fit its field."""
    kind = error["type"]
    text = f" {node.text!r}" if isinstance(node, Scalar) and node.text else ""
    if kind == "value_error":
        return "R49", f"{name}: {error['ctx']['error']}", None
    if kind == "literal_error":
        legal = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        near = close_to(str(node.value), legal) if isinstance(node, Scalar) else None
        what = f"{name} is{text or ' ' + kind_of(node)}; it must be {error['ctx']['expected']}"
        return "R37", what, f"did you mean {near}?" if near else None
    expected = _EXPECTED.get(kind.split("_")[0])
    if expected is not None and re.search(r"_(type|parsing|from_float|attributes_type|exact_type)$", kind):
        if isinstance(node, Scalar) and node.value is None:
            return "R39", f"{name} is required: {expected}, found null", None
        return "R37", f"{name} must be {expected}, found {kind_of(node)}{text}", _type_hint(expected, node)
    message = error["msg"].removeprefix("Input should be ")
    return "R35", f"{name} is{text or ' ' + kind_of(node)}; it must be {message}", None


def _type_hint(expected: str, node: Node) -> str | None:
    if not isinstance(node, Scalar):
        return None
    word = node.text.lower()
    if word in ("none", "nil", "nothing"):
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
        return f"write {word.replace('_', '').replace(',', '')}" + ("" if node.plain else " without quotes")
    return None
