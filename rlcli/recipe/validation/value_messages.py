"""Words for values that do not fit their fields, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlcli.recipe.parsing.scalars import ScalarError, core_scalar
from rlcli.recipe.parsing.tree import KeyPath, Node, Scalar, dotted, is_null, kind_of
from rlcli.recipe.synonyms import word_here
from rlcli.spelling import nearest_name

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
_UNQUOTED: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
"""Word for a type → the types of values without quotes that it takes."""
_OF_TYPE = re.compile(r"_(type|parsing|from_float|attributes_type|exact_type)$")
"""Which of pydantic's errors are about the type of a value."""
_THOUSANDS = re.compile(r"\d+|[1-9]\d{0,2}(,\d{3})+", re.ASCII)
_ENTRIES = re.compile(r"[\w./-]+(, ?[\w./-]+)*")
_DECIMAL_COMMA = re.compile(r"\d+,\d+", re.ASCII)
_BOUND = "Input should be "
"""How pydantic's messages about bounds begin."""
_BOUNDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
"""Pydantic's words → ours."""


Misfit = tuple[str, str, str | None]
"""(message id, fault, hint) for a value that does not fit its field."""


def describe(errors: Sequence[Any], node: Node, name: str) -> Misfit:
    """(message id, fault, hint) for a value that does not fit its field; several errors are those
    of the types that the field may have."""
    return (
        _describe(errors[0], node, name)
        if len(errors) == 1
        else _describe_union(errors, node, name)
    )


def _describe_union(errors: Sequence[Any], node: Node, name: str) -> Misfit:
    """Like `_describe`, for a field that may have several types, none of which fits."""
    words = []
    for error in errors:
        if error["type"] == "literal_error":
            words.append(error["ctx"]["expected"])
        elif (expected := _EXPECTED.get(error["type"].split("_")[0])) is not None:
            words.append(expected)
        else:
            return _describe(error, node, name)
    expected = " or ".join(dict.fromkeys(words))
    return "R37", f"{name} must be {expected}, found {kind_of(node)}{_text_of(node)}", None


def _describe(error: Any, node: Node, name: str) -> Misfit:
    """(message id, fault, hint) for a value that does not fit its field."""
    kind = error["type"]
    if kind == "value_error":
        return "R49", f"{name}: {error['ctx']['error']}", None
    if kind == "literal_error":
        return _describe_choice(error["ctx"]["expected"], node, name)
    expected = _EXPECTED.get(kind.split("_")[0])
    if expected is not None and _OF_TYPE.search(kind):
        return _describe_type(expected, node, name)
    if kind.endswith(("too_long", "too_short")):
        return "R35", f"{name} {_length_of(error, node)}", None
    if not error["msg"].startswith(_BOUND):
        return "R35", f"{name}: {error['msg']}", None
    return _describe_bound(error["msg"], node, name)


def _length_of(error: Any, node: Node) -> str:
    """`has 3 items; it may have at most 2`."""
    least, most = (error["ctx"].get(key) for key in ("min_length", "max_length"))
    bound = f"may have at most {most}" if least is None else f"must have at least {least}"
    if isinstance(node, Scalar):
        return f"has {len(str(node.value))} characters; it {bound}"
    return f"has {error['ctx']['actual_length']} items; it {bound}"


def _text_of(node: Node) -> str:
    """What is written, in quotes, after a space; empty if it is not a single value."""
    return f" {node.text!r}" if isinstance(node, Scalar) and node.text else ""


def _describe_choice(expected: str, node: Node, name: str) -> Misfit:
    legal = re.findall(r"'([^']*)'", expected)
    word = str(node.value) if isinstance(node, Scalar) else ""
    near = word_here(word, legal) or nearest_name(word, legal)
    fault = f"{name} is{_text_of(node) or ' ' + kind_of(node)}; it must be {expected}"
    return "R37", fault, f"did you mean {near}?" if near else None


def _describe_type(expected: str, node: Node, name: str) -> Misfit:
    if is_null(node):
        return "R39", f"{name} is required: {expected}, found null", None
    fault = f"{name} must be {expected}, found {kind_of(node)}{_text_of(node)}"
    return "R37", fault, _type_hint(expected, node)


def _describe_bound(message: str, node: Node, name: str) -> Misfit:
    bound = message.removeprefix(_BOUND)
    for written, shorter in _BOUNDS.items():
        bound = bound.replace(written, shorter)
    is_number = isinstance(node, Scalar) and isinstance(node.value, int | float)
    value = f" {node.text}" if isinstance(node, Scalar) and is_number else _text_of(node)
    return "R35", f"{name} is{value or ' ' + kind_of(node)}; it must be {bound}", None


def _type_hint(expected: str, node: Node) -> str | None:
    if not isinstance(node, Scalar):
        return None
    word = node.text.lower()
    if not node.plain and _reads_as(node.text) in _UNQUOTED.get(expected, ()):
        return f"write {node.text} without quotes"
    if expected == "a list":
        return _as_list(node, word)
    if word in ("none", "nil", "nothing") or (expected == "a mapping" and node.value is False):
        return "write null"
    if expected == "bool":
        return "only true and false are booleans"
    if expected == "int" and isinstance(node.value, float) and node.value == int(node.value):
        return f"write {int(node.value)}"
    number = _number_in(word) if expected in ("int", "float") else None
    if number is not None and isinstance(node.value, str):
        return f"write {number}" + ("" if node.plain else " without quotes")
    return None


def _reads_as(text: str) -> type | None:
    """The type that a text would have without its quotes."""
    try:
        return type(core_scalar(text))
    except ScalarError:
        return None


def _as_list(node: Scalar, word: str) -> str | None:
    """The list that is meant by a single value; null would be the key's default."""
    if word in ("none", "nil", "nothing") or node.value is False:
        return "write []"
    is_plain = _ENTRIES.fullmatch(node.text) is not None and not isinstance(node.value, bool)
    return f"write [{node.text}]" if is_plain else None


def _number_in(word: str) -> str | None:
    """The number that is meant by digits with zeros first, with separators of thousands, or with a
    decimal comma."""
    digits = word.replace("_", "")
    if _THOUSANDS.fullmatch(digits):
        return digits.replace(",", "").lstrip("0") or "0"
    return digits.replace(",", ".") if _DECIMAL_COMMA.fullmatch(digits) else None


def path_hint(path: KeyPath, text: str) -> str | None:
    """What to write where a role, or the datasets, are given as a single text: probably a path."""
    if path == ("datasets",):
        return f"to train on other rows: {rows_of('train', text)}"
    if len(path) == 2 and path[0] == "models":
        return f"to start from other weights: {dotted(path)}.path={text}"
    return None


def rows_of(dataset: str | int, file: str) -> str:
    """The override with which a dataset reads a file."""
    return f"'datasets.{dataset}={{type: hf, args: {{path: {file}}}}}'"
