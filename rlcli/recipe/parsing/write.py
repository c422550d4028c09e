"""Write plain values as YAML that the reader reads back unchanged."""

from __future__ import annotations

import json
import re
from typing import Any

from rlcli.recipe.parsing.scalars import reads_as_text

_SIMPLE = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+#-]*(:[A-Za-z0-9_./@+#-]+)*")


def to_yaml(value: Any, room: int = 80) -> str:
    """Block style, in the given order; text that would be read as another type is quoted. A list
    that does not fit into `room` columns gets one line per item."""
    return "\n".join(_lines(value, room)) + "\n"


def _lines(value: Any, room: int) -> list[str]:
    lines: list[str] = []
    for key, item in value.items():
        line = f"{_text(key)}: {_flow(item)}"
        if isinstance(item, dict) and item:
            lines.append(f"{_text(key)}:")
            lines.extend(f"  {line}" for line in _lines(item, room - 2))
        elif isinstance(item, list | tuple) and item and len(line) > room:
            lines.append(f"{_text(key)}:")
            lines.extend(f"  - {_flow(listed)}" for listed in item)
        else:
            lines.append(line)
    return lines


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, str):
        return _text(value.replace("${", "$${"))
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _text(text: str) -> str:
    if _SIMPLE.fullmatch(text) and reads_as_text(text):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else _escape(c) for c in quoted)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\U{code:08X}" if code > 0xFFFF else f"\\u{code:04X}"
