"""JSON from another machine, limited in size before it is parsed,
because that multiplies it by up to thirty."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DEEPEST = 64
"""Levels of nesting. Deeper values break what compares or prints them."""


@dataclass(frozen=True)
class Size:
    """The largest answer to a request."""

    bytes: int
    separators: int
    """Opening brackets and commas, also in texts: there is at most one value for each."""


def parsed(content: bytes, most: Size) -> Any:
    """Raises ValueError for what is not JSON, or larger or deeper than allowed."""
    if len(content) > most.bytes:
        raise ValueError(f"of more than {most.bytes:,} bytes")
    if sum(map(content.count, (b"[", b"{", b","))) > most.separators:
        raise ValueError(f"with more than {most.separators:,} values")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("that is not JSON") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises ValueError for a value that is nested more deeply than allowed."""
    level, depth = [value], 0
    while level := [child for parent in level for child in _children(parent)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"that is nested more than {DEEPEST} levels deep")


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
