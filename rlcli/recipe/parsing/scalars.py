"""YAML 1.2 core scalars: `1e-5` is a float, `no`, `12:30` and `2026-01-01` are text."""

from __future__ import annotations

import math
import re

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_ZEROS_FIRST = re.compile(r"[-+]?0[0-9]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

MAX_INT = 2**63 - 1


class ScalarError(ValueError):
    """A value not allowed in a recipe; `code` is the id of the message."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


def core_scalar(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar.

    Only `true` and `false` are booleans; there are no octal, hexadecimal or sexagesimal numbers and
    no dates. A number written with leading zeros (`007`) stays text. Raises ScalarError for numbers
    that are not finite or exceed 64 bits, and for nothing at all: the value of a variable that is
    not set must not mean null.
    """
    if not text:
        raise ScalarError(
            'the value is empty; write null for none, "" in quotes for an empty text', "R40"
        )
    if text in ("~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INT.fullmatch(text):
        if len(text) > 20 or abs(int(text)) > MAX_INT:
            raise ScalarError(
                f"{_shortened(text)} is out of range: integers go up to {MAX_INT}", "R35"
            )
        return int(text)
    if _FLOAT.fullmatch(text) and not _ZEROS_FIRST.fullmatch(text):
        if not math.isfinite(value := float(text)):
            raise ScalarError(f"{_shortened(text)} is too large; a number must be finite", "R34")
        return value
    if _NOT_FINITE.fullmatch(text):
        raise ScalarError(f"{text} is not allowed; a number must be finite", "R34")
    return text


def _shortened(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:12]}… ({len(text)} digits)"


def reads_as_text(text: str) -> bool:
    """Whether the text, written without quotes, is read back as text."""
    try:
        return isinstance(core_scalar(text), str)
    except ScalarError:
        return False
