"""Reads tool calls in each of the formats in which models write them.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    xml      <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    glm      <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    mistral  [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
    llama3   {"name": "add", "parameters": {"a": 1}}, with or without <|python_tag|> before it
    json     {"name": "add", "arguments": {"a": 1}} anywhere in a text

Llama's models write `arguments` too at times, as others do `parameters`: both are read.

What cannot be read is not an error: a reader notes what is wrong with it, for the model to read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlcli.api.peer_json import check_depth
from rlcli.api.tool_schema import allows

MOST_CALLS = 64
"""Calls that are read in a text."""


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote. Its arguments may not be those of the tool: see
    `check_arguments`."""

    name: str
    arguments: dict[str, Any]


@dataclass
class CallReader:
    """Reads a text from left to right."""

    body: str
    position: int
    """Where reading continues."""
    types: Mapping[str, Mapping[str, Any]]
    """Tool → argument → its schema."""
    texts: list[str] = field(default_factory=list)
    """The parts before `position` that are not calls."""
    calls: list[ToolCall] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Where each part with calls begins and ends."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with parts that look like calls, a line each."""

    def read(self, form: CallFormat) -> None:
        """Read all calls. What is before and after a call is text; so is a call with a fault."""
        while len(self.calls) + len(self.problems) <= MOST_CALLS:
            match = form.opening.search(self.body, self.position)
            if match is None:
                return
            self.texts.append(self.body[self.position : match.start()])
            self.position = match.end()
            try:
                calls = form.read(self, match.start())
            except (ValueError, RecursionError) as error:
                reason = str(error) if type(error) is ValueError else "it is not valid JSON"
                self.problems.append(f"a tool call cannot be read: {reason}")
                self.texts.append(self.body[match.start() : self.position])
                continue
            self.calls += calls
            self.spans += [(match.start(), self.position)] if calls else []
        del self.calls[MOST_CALLS:]
        self.problems.insert(0, f"only {MOST_CALLS} tool calls of a turn are read")

    def json(self, position: int) -> Any:
        """The JSON value there; reading continues behind it. Raises ValueError."""
        value, end = _DECODER.raw_decode(self.body, _behind_blanks(self.body, position))
        _check(value)
        self.position = end
        return value

    def skip(self, closing: str) -> bool:
        """Continue behind this if it comes next; whether it does."""
        position = _behind_blanks(self.body, self.position)
        if not self.body.startswith(closing, position):
            return False
        self.position = position + len(closing)
        return True

    def demand(self, expected: str) -> None:
        """Continue behind this. Raises ValueError if something else comes next."""
        if not self.skip(expected):
            raise ValueError(f"{expected} is missing")

    def until(self, closing: str) -> str:
        """The text up to this; reading continues behind it. Raises ValueError if it is missing."""
        end = self.body.find(closing, self.position)
        if end < 0:
            raise ValueError(f"{closing} is missing")
        text, self.position = self.body[self.position : end], end + len(closing)
        return text

    def close(self, closing: str) -> None:
        """Continue behind this, which may be missing at the end of a turn. Raises ValueError."""
        if _behind_blanks(self.body, self.position) < len(self.body):
            self.demand(closing)

    def typed(self, tool: str, argument: str, value: str) -> Any:
        """The value of an argument that was written as a text."""
        return _typed(value, self.types.get(tool, {}).get(argument))


def _read_hermes(reader: CallReader, _: int) -> list[ToolCall]:
    call = _call_of(reader.json(reader.position), "arguments")
    reader.close("</tool_call>")
    return [call]


def _read_xml(reader: CallReader, _: int) -> list[ToolCall]:
    reader.demand("<function=")
    name = _name(reader.until(">"))
    arguments: dict[str, Any] = {}
    while reader.skip("<parameter="):
        key = reader.until(">").strip()
        value = reader.until("</parameter>").removeprefix("\n").removesuffix("\n")
        _add(arguments, key, reader.typed(name, key, value))
    reader.demand("</function>")
    reader.close("</tool_call>")
    return [ToolCall(name, arguments)]


def _read_glm(reader: CallReader, _: int) -> list[ToolCall]:
    heading, *pairs = reader.until("</tool_call>").split("<arg_key>")
    name = _name(heading)
    arguments: dict[str, Any] = {}
    for pair in pairs:
        match = _GLM_PAIR.fullmatch(pair)
        if match is None:
            raise ValueError("an argument is <arg_key>…</arg_key><arg_value>…</arg_value>")
        key = match[1].strip()
        _add(arguments, key, reader.typed(name, key, match[2]))
    return [ToolCall(name, arguments)]


def _read_mistral(reader: CallReader, _: int) -> list[ToolCall]:
    if reader.body.startswith(("[", "{"), _behind_blanks(reader.body, reader.position)):
        written = reader.json(reader.position)
        values = written if isinstance(written, list) else [written]
        return [_call_of(value, "arguments") for value in values]
    name = _name(reader.until("[ARGS]").partition("[CALL_ID]")[0])
    return [_call_of({"name": name, "arguments": reader.json(reader.position)}, "arguments")]


def _read_json(reader: CallReader, start: int) -> list[ToolCall]:
    """The call that a JSON object without any mark is; none if it has no arguments."""
    begin = reader.body.find("{", start)
    if begin < 0:
        raise ValueError("an object is missing")
    value = reader.json(begin)
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    if key is None:
        reader.texts.append(reader.body[begin : reader.position])
        return []
    reader.skip(";")
    return [_call_of(value, key)]


@dataclass(frozen=True)
class CallFormat:
    opening: re.Pattern[str]
    """Where a call, or a list of calls, begins."""
    read: Callable[[CallReader, int], list[ToolCall]]
    """The calls from there on. Raises ValueError, or RecursionError, if they cannot be read."""


_TAG = re.compile("<tool_call>")
_OBJECT = r'\{\s{0,99}"(?:name|type)"'
_GLM_PAIR = re.compile(r"([^<]*)</arg_key>\s*<arg_value>(.*)</arg_value>\s*", re.DOTALL)
_BLANKS = re.compile(r"\s*")

FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(_TAG, _read_hermes),
    "xml": CallFormat(_TAG, _read_xml),
    "glm": CallFormat(_TAG, _read_glm),
    "mistral": CallFormat(re.compile(r"\[TOOL_CALLS\]"), _read_mistral),
    "llama3": CallFormat(re.compile(rf"<\|python_tag\|>|{_OBJECT}"), _read_json),
    "json": CallFormat(re.compile(_OBJECT), _read_json),
}
"""Formats by name, in the order in which they are tried."""


def _behind_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position


def _call_of(value: Any, key: str) -> ToolCall:
    """The call that a JSON value describes, with its arguments under this key. Raises
    ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"it must be an object with name and {key}")
    if not isinstance(value.get(key), dict):
        raise ValueError(f"its {key} must be an object")
    return ToolCall(_name(value.get("name")), value[key])


def _name(written: Any) -> str:
    name = written.strip() if isinstance(written, str) else ""
    if not name or len(name) > 200 or not name.isprintable():
        raise ValueError("its name must be that of a tool")
    return name


def _add(arguments: dict[str, Any], key: str, value: Any) -> None:
    if key in arguments:
        raise ValueError(f"the key {key[:60]!r} appears twice")
    arguments[key] = value


def _typed(value: str, schema: Mapping[str, Any] | None) -> Any:
    """A value that was written as a text: of a type that the schema allows. Where it allows both,
    or neither, it is JSON if it can be read as that, otherwise the text."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    spelt = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
    try:
        typed = _DECODER.decode(spelt)
        _check(typed)
    except (ValueError, RecursionError):
        return value
    is_text = allows(schema, value) and not allows(schema, typed)
    return value if is_text else typed


def _check(value: Any) -> None:
    """Raises ValueError for a JSON value that is too deep, or that no tokenizer could encode."""
    check_depth(value)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        _add(fields, key, value)
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:60]} is not a finite number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
