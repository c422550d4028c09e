"""How models write tool calls, and how these are read from what a model wrote.

The format is that of the model's chat template, which is found by rendering a message with a call
and reading it again. What a model writes is hostile input: reading it never raises, takes a bounded
time, and says what is wrong in lines that the model can read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.api.chat_template import DAY, conversation_text, name_of, shared_length, template_of
from rlcli.api.special_tokens import unmarked
from rlcli.api.tool_call_reader import FORMATS, CallReader, ToolCall
from rlcli.errors import ModelError, UsageError

Schema = Mapping[str, Any]

LONGEST = 1 << 20
"""Characters of a text that are read."""
MOST_PROBLEMS = 8

AUTO = "auto"
_END = re.compile("</think>")


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
        reader = self._read(text[:LONGEST], start)
        if (later := _end_of_later_reasoning(reader, start)) is not None:
            reader = self._read(text[:LONGEST], start := later)
        if len(text) > LONGEST:
            reader.problems.append(f"only the first {LONGEST:,} characters are read for tool calls")
        problems = tuple(dict.fromkeys(reader.problems))[:MOST_PROBLEMS]
        if not reader.calls:
            return Parsed(text, problems=problems)
        rest = "".join([text[:start], *reader.texts, text[reader.position :]])
        return Parsed(rest.strip(), tuple(reader.calls), problems)

    def _read(self, text: str, start: int) -> CallReader:
        reader = CallReader(text, start, _types_of(self.tools))
        reader.read(FORMATS[self.name])
        return reader


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
    if PROBE.arguments["text"] not in written:  # Kimi's writes an id in place of the name
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
    """Where the answer starts in a turn that begins with reasoning: behind that; at its end if that
    never ends."""
    if not in_reasoning and not text.lstrip().startswith("<think>"):
        return 0
    end = _END.search(text)
    return end.end() if end else len(text)


def _end_of_later_reasoning(reader: CallReader, start: int) -> int | None:
    """Where further reasoning ends, behind which the answer starts instead; None if there is none.
    An end among the arguments of a call ends nothing."""
    ends = (match.end() for match in _END.finditer(reader.body, start))
    outside = (end for end in ends if not any(a < end <= b for a, b in reader.spans))
    return max(outside, default=None)
