"""Tool calls in texts of models without a chat template: JSON objects with name and arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LONGEST = 1 << 16
"""Characters of a text that are read."""


@dataclass(frozen=True)
class WrittenCall:
    """A call that a model has written."""

    name: str
    arguments: Mapping[str, Any]


def tool_calls(text: str) -> tuple[list[WrittenCall], str | None]:
    """The calls in a text, `{"name": "add", "arguments": {"a": 1, "b": 2}}` each, and what is wrong
    with the rest if it looks like a call. Never raises: the text is what a model wrote."""
    calls: list[WrittenCall] = []
    start = text[:LONGEST].find("{")
    while start >= 0:
        try:
            written, end = _DECODER.raw_decode(text[:LONGEST], start)
        except (ValueError, RecursionError):
            return calls, "a tool call is not valid JSON"
        if not _is_call(written):
            return calls, "a tool call is an object with name, a text, and arguments, an object"
        calls.append(WrittenCall(written["name"], written["arguments"]))
        start = text[:LONGEST].find("{", end)
    return calls, None


_DECODER = json.JSONDecoder()


def _is_call(written: Any) -> bool:
    return (
        isinstance(written, dict)
        and isinstance(written.get("name"), str)
        and isinstance(written.get("arguments"), dict)
    )
