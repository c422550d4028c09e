"""How models write tool calls, and how these are read from what a model wrote.

The format is that of the model's chat template, which is found by rendering a message with a call
and reading it again. What a model writes is hostile input: reading it never raises, takes a bounded
time, and says what is wrong in lines that the model can read.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    xml      <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    glm      <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    mistral  [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
    llama3   {"name": "add", "parameters": {"a": 1}}, with or without <|python_tag|> before it
    json     {"name": "add", "arguments": {"a": 1}} anywhere in a text
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcli.api.chat_template import DAY, conversation_text, name_of, shared_length, template_of
from rlcli.api.peer_json import check_depth
from rlcli.api.special_tokens import unmarked
from rlcli.api.tool_schema import allows
from rlcli.errors import ModelError, UsageError

Schema = Mapping[str, Any]

LONGEST = 1 << 20
"""Characters of a text that are read."""
MOST_CALLS = 64
"""Calls that are read in a text."""
MOST_PROBLEMS = 8

AUTO = "auto"


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote. Its arguments may not be those of the tool: see
    `check_arguments`."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """The text of a turn, read."""

    text: str
    """Without the calls."""
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    """What is wrong with parts that look like calls, a line each."""

    @property
    def has_calls(self) -> bool:
        """Whether it calls tools, rightly or not."""
        return bool(self.calls or self.problems)

    @property
    def message(self) -> dict[str, Any]:
        """The turn as chat templates expect it. Calls have ids of nine characters, as some
        templates demand: see `call_id`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                _as_field(call, call_id(number)) for number, call in enumerate(self.calls)
            ]
        return message


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls."""

    name: str
    tools: Sequence[Schema] = ()
    """Schemas of the tools: formats that write a value as a text need its type."""

    def parse(self, text: str, *, in_reasoning: bool = False) -> Parsed:
        """Read a turn, decoded with special tokens and without the one that ended it. Calls in its
        reasoning do not count. `in_reasoning`: whether it begins inside of that, see
        `chat_template.opens_reasoning`."""
        text = text.encode("utf-8", "replace").decode()
        start = _end_of_reasoning(text[:LONGEST], in_reasoning)
        reader = _Reader(text[:LONGEST], start, _types_of(self.tools))
        reader.read(FORMATS[self.name])
        if len(text) > LONGEST:
            reader.problems.append(f"only the first {LONGEST:,} characters are read for tool calls")
        problems = tuple(dict.fromkeys(reader.problems))[:MOST_PROBLEMS]
        if not reader.calls:
            return Parsed(text, problems=problems)
        rest = "".join([text[:start], *reader.texts, text[reader.position :]])
        return Parsed(rest.strip(), tuple(reader.calls), problems)


def tool_format(tokenizer: Any, name: str = AUTO, tools: Sequence[Schema] = ()) -> ToolFormat:
    """The format of a tokenizer's chat template, or the one with this name (`FORMATS`). A template
    that writes no calls, or none at all, has `json`.

    `tools`: schemas of the tools. Raises UsageError for an unknown name, ModelError F32 for a
    template with a format that is not known here.
    """
    if name != AUTO:
        if name not in FORMATS:
            known_names = ", ".join([AUTO, *FORMATS])
            raise UsageError(f"the tool format {name!r} is unknown", hint=f"one of {known_names}")
        return ToolFormat(name, tools)
    written = _written_call(tokenizer) if template_of(tokenizer) else ""
    if PROBE.name not in written:
        return ToolFormat("json", tools)
    for each in FORMATS:
        if ToolFormat(each, [_PROBE_SCHEMA]).parse(written).calls == (PROBE,):
            return ToolFormat(each, tools)
    raise ModelError(
        f"the chat template of {name_of(tokenizer)} writes tool calls in a format that is not "
        f"supported: {written.strip()[:200]!r}",
        hint="set tool_format: json, and describe it in the prompt",
        code="F32",
    )


def writes_tools(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template writes tools into the prompt, instead of refusing or
    ignoring them. Found by trial."""
    question = [{"role": "user", "content": "?"}]
    try:
        text = conversation_text(tokenizer, question, tools=[_PROBE_SCHEMA], day=DAY)
    except ModelError:
        return False
    return PROBE.name in unmarked(text)


def call_id(number: int) -> str:
    """The id of a call in `Parsed.message`, for the `tool_call_id` of the message with its
    result."""
    return f"call{number:05}"


PROBE = ToolCall("probe_tool", {"text": "two words", "count": 3})
_PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "Does nothing.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "count": {"type": "integer", "description": "A number."},
            },
            "required": ["text", "count"],
        },
    },
}


def _as_field(call: ToolCall, id_: str) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _written_call(tokenizer: Any) -> str:
    """What the template writes for a turn with a call; empty if it refuses it."""
    answer = "answer"
    for arguments in (PROBE.arguments, json.dumps(PROBE.arguments)):
        message = Parsed("", (PROBE,)).message
        message["tool_calls"][0]["function"]["arguments"] = arguments
        try:
            called = _written_turn(tokenizer, message)
            plain = _written_turn(tokenizer, {"role": "assistant", "content": answer})
        except ModelError:
            continue
        return called.removesuffix(plain.rpartition(answer)[2])
    return ""


def _written_turn(tokenizer: Any, message: Mapping[str, Any]) -> str:
    """What the template writes for a message of the assistant, after its generation prompt."""
    question = {"role": "user", "content": "?"}
    how: dict[str, Any] = {"tools": [_PROBE_SCHEMA], "day": DAY}
    prompt = unmarked(conversation_text(tokenizer, [question], add_generation_prompt=True, **how))
    text = unmarked(conversation_text(tokenizer, [question, message], **how))
    return text[shared_length(prompt, text) :]


def _types_of(tools: Sequence[Schema]) -> dict[str, Mapping[str, Any]]:
    """Tool → argument → its schema."""
    types: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        types[function["name"]] = (function.get("parameters") or {}).get("properties", {})
    return types


def _end_of_reasoning(text: str, in_reasoning: bool) -> int:
    """Where the answer starts in a turn: behind its reasoning; at its end if that never ends."""
    end = text.rfind("</think>")
    if end >= 0:
        return end + len("</think>")
    return len(text) if in_reasoning or text.lstrip().startswith("<think>") else 0


@dataclass
class _Reader:
    """Reads a text from left to right."""

    body: str
    position: int
    types: Mapping[str, Mapping[str, Any]]
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def read(self, form: _Format) -> None:
        """Read all calls. What is before and after a call is text; so is a call with a fault."""
        while len(self.calls) + len(self.problems) <= MOST_CALLS:
            match = form.opening.search(self.body, self.position)
            if match is None:
                return
            self.texts.append(self.body[self.position : match.start()])
            self.position = match.end()
            try:
                self.calls += form.read(self, match.start())
            except (ValueError, RecursionError) as error:
                reason = str(error) if type(error) is ValueError else "it is not valid JSON"
                self.problems.append(f"a tool call cannot be read: {reason}")
                self.texts.append(self.body[match.start() : self.position])
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


def _read_hermes(reader: _Reader, _: int) -> list[ToolCall]:
    call = _call_of(reader.json(reader.position), "arguments")
    reader.close("</tool_call>")
    return [call]


def _read_xml(reader: _Reader, _: int) -> list[ToolCall]:
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


def _read_glm(reader: _Reader, _: int) -> list[ToolCall]:
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


def _read_mistral(reader: _Reader, _: int) -> list[ToolCall]:
    if reader.body.startswith(("[", "{"), _behind_blanks(reader.body, reader.position)):
        written = reader.json(reader.position)
        values = written if isinstance(written, list) else [written]
        return [_call_of(value, "arguments") for value in values]
    name = _name(reader.until("[ARGS]").partition("[CALL_ID]")[0])
    return [_call_of({"name": name, "arguments": reader.json(reader.position)}, "arguments")]


def _read_llama3(reader: _Reader, start: int) -> list[ToolCall]:
    return _bare_calls(reader, start, ("parameters",))


def _read_json(reader: _Reader, start: int) -> list[ToolCall]:
    return _bare_calls(reader, start, ("arguments", "parameters"))


def _bare_calls(reader: _Reader, start: int, keys: Sequence[str]) -> list[ToolCall]:
    """The call that a JSON object without any mark is; none if it has no arguments."""
    begin = reader.body.find("{", start)
    if begin < 0:
        raise ValueError("an object is missing")
    value = reader.json(begin)
    key = next((key for key in keys if key in value), None)
    if key is None:
        reader.texts.append(reader.body[begin : reader.position])
        return []
    reader.skip(";")
    return [_call_of(value, key)]


@dataclass(frozen=True)
class _Format:
    opening: re.Pattern[str]
    """Where a call, or a list of calls, begins."""
    read: Callable[[_Reader, int], list[ToolCall]]
    """The calls from there on. Raises ValueError, or RecursionError, if they cannot be read."""


_TAG = re.compile("<tool_call>")
_OBJECT = r'\{\s{0,99}"(?:name|type)"'
_GLM_PAIR = re.compile(r"([^<]*)</arg_key>\s*<arg_value>(.*)</arg_value>\s*", re.DOTALL)
_BLANKS = re.compile(r"\s*")

FORMATS: Mapping[str, _Format] = {
    "hermes": _Format(_TAG, _read_hermes),
    "xml": _Format(_TAG, _read_xml),
    "glm": _Format(_TAG, _read_glm),
    "mistral": _Format(re.compile(r"\[TOOL_CALLS\]"), _read_mistral),
    "llama3": _Format(re.compile(rf"<\|python_tag\|>|{_OBJECT}"), _read_llama3),
    "json": _Format(re.compile(_OBJECT), _read_json),
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
