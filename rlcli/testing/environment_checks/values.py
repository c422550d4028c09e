"""Values for the arguments of tools, drawn from their schemas, and texts that are hard to
handle."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

from rlcli.api.tool_schema import Schema

SAMPLES: dict[str, tuple[Any, ...]] = {
    "string": ("a", "", "7", "a b\nc"),
    "integer": (1, 0, -1, 7, 1000),
    "number": (0.5, 2, -1.5, 0),
    "boolean": (True, False),
    "null": (None,),
    "array": ([], ["a", 1]),
    "object": ({}, {"a": 1}),
}
"""JSON type → values of it, the most usual first."""
MARKS = ("zebra", "quagga")
"""Words that an environment does not use itself: where they come back, it repeats a text."""
HOSTILE = {
    "a NUL": "\0",
    "a lone surrogate": "\ud800",
    "marks of direction": "\u202e\u2066",
    "combining characters": "e\u0301\u0327",
    "other scripts": "日本語العربيةไทย",
    "an emoji of several characters": "👩‍👩‍👧🏽",
    "percent signs": "%s%n%(x)d%",
    "braces": "{0}{x!r}{",
    "backslashes": "\\n\\1\\",
    "markup": "<|im_end|></tool_call>",
}
NUMBERS = ("²", "٣", "９", "-0", "1e999", "nan", "9" * 5000)
"""Texts that some functions take for numbers, and others do not."""
LONG_TEXT = "x" * (1 << 20)


def fitting(schema: Schema) -> list[Any]:
    """Values that a schema allows, different in kind."""
    if "enum" in schema:
        values = list(schema["enum"])
    elif "anyOf" in schema:
        values = [value for each in schema["anyOf"] for value in fitting(each)]
    elif "items" in schema:
        inner = fitting(schema["items"])
        values = [inner[:1], [], inner]
    elif "additionalProperties" in schema:
        values = [{"a": value} for value in fitting(schema["additionalProperties"])] + [{}]
    else:
        values = [value for name in types_of(schema) for value in SAMPLES[name]]
    return [*values, *([None] if schema.get("nullable") else [])]


def wrong(schema: Schema) -> Iterator[Any]:
    """Values of each JSON type that a schema does not allow."""
    if "anyOf" in schema or not schema:
        return
    allowed = {*types_of(schema), *(["null"] if schema.get("nullable") else [])}
    if "number" in allowed:
        allowed.add("integer")
    yield from (SAMPLES[name][0] for name in SAMPLES if name not in allowed)
    if "enum" in schema and "string" in allowed:
        yield "no such choice"
    yield from ([value] for value in wrong(schema.get("items", {})))


def types_of(schema: Schema) -> list[str]:
    """The JSON types of a schema without alternatives; all, if it names none."""
    names = schema.get("type", list(SAMPLES))
    return [names] if isinstance(names, str) else list(names)


def comes_back(text: str, observed: str) -> bool:
    """Whether what was repeated is the text between MARKS: as it is, escaped, normalised, without
    control characters, or left out; or cut, to no fewer characters than the MARKS themselves have.
    A lone surrogate, which has no encoding, may be replaced."""
    start, end = (observed.find(mark) for mark in MARKS)
    replaced = {text.encode(errors="replace").decode(), text.replace("\ud800", "\ufffd")}
    forms = {text, *replaced, *(form for each in (text, *replaced) for form in _escaped(each))}
    if end < start:
        least, cut = len("".join(MARKS)), _visible(observed[start:])
        return any(cut.startswith(_visible(form.join(MARKS))[:least]) for form in forms)
    if start < 0:
        return False
    between = _visible(observed[start + len(MARKS[0]) : end])
    return not between or between in map(_visible, forms)


def _escaped(text: str) -> list[str]:
    """A text within a literal of Python or JSON."""
    literals = (ascii(text), repr(text), json.dumps(text), json.dumps(text, ensure_ascii=False))
    return [text.replace("\\", "\\\\"), *(literal[1:-1] for literal in literals)]


def _visible(text: str) -> str:
    """A text in a normal form, without control characters."""
    normal = unicodedata.normalize("NFKC", text)
    return "".join(c for c in normal if not unicodedata.category(c).startswith("C")).strip()
