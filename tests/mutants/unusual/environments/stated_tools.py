"""Tools that are not methods, which an instance states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.environment import Environment, register_environment
from rlcli.api.tool_schema import Schema


@dataclass(kw_only=True)
class StatedTools(Environment):
    """Measures texts, with a tool for each measure."""

    REPRODUCIBLE: ClassVar[bool] = True

    def tool_schemas(self) -> Sequence[Schema]:
        parameters = {
            "type": "object",
            "properties": {"text": {"type": "string"}, "extra": {"anyOf": [{"type": "integer"}]}},
            "required": ["text"],
        }
        function = {"description": "Measure a text.", "parameters": parameters}
        names = ("length", "words")
        return [{"type": "function", "function": {**function, "name": name}} for name in names]

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> int:
        text = arguments["text"]
        return len(text if name == "length" else text.split()) + arguments.get("extra", 0)


register_environment("stated_tools", StatedTools)
