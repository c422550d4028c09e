"""Conversations as rows store them: messages with a role and a content,
and the tools the assistant may call."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rlcli.api.chat_template import REASONING_FIELDS

from ._jsonl import BadRow, MissingField, kind_of, text_field

Message = dict[str, Any]

Prompt = str | list[Message]
"""The text of a user's message, or the messages up to the one to answer."""

RESULTS = ("tool", "function", "ipython", "environment")
"""Roles of what tools returned, which may be nothing."""

MAY_BE_EMPTY = ("system", "developer", *RESULTS)
"""Roles whose messages may have no text: an empty system prompt replaces one that templates write
otherwise."""

ROLES = ("system", "developer", "user", "assistant", *RESULTS)
"""Roles that chat templates know."""

OTHER_ROLES = "give it a role that the template writes, such as system instead of developer"
"""The hint for a message that a template leaves out."""

CALL = "function_call"
"""Who calls a tool in ShareGPT, and the field of a message with its only call in OpenAI's older
format."""

SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    CALL: "assistant",
    "observation": "tool",
}
"""Roles of messages in the form `{"from": …, "value": …}`."""


@dataclass(frozen=True)
class StoredConversation:
    """Messages up to the assistant's last one; nothing after it can be learned."""

    messages: list[Message]
    tools: list[Any] | None = None

    @property
    def turns(self) -> list[int]:
        """Indices of the assistant's messages; there is at least one."""
        return [
            index for index, message in enumerate(self.messages) if message["role"] == "assistant"
        ]

    @property
    def system(self) -> str | None:
        """The system prompt, if there is one."""
        first = self.messages[0]
        return first["content"] if first["role"] == "system" else None

    @property
    def prompt(self) -> str:
        """The text it begins with: the first message that is neither the system's nor the
        assistant's."""
        return next(
            (m["content"] for m in self.messages if m["role"] not in ("system", "assistant")), ""
        )


def read_conversation(
    fields: dict[str, Any], messages_key: str, tools_key: str, system: str | None
) -> StoredConversation:
    """The conversation in a row. `system`: the system prompt of conversations without one.
    Raises BadRow."""
    messages = _messages(fields, messages_key)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise BadRow("no message is the assistant's, so there is nothing to train on")
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return StoredConversation(messages, _tools(fields.get(tools_key), tools_key))


def is_conversation(value: Any) -> bool:
    """Whether a field holds messages, which tables often have as JSON text, or a single one."""
    if isinstance(value, str):
        return _holds_messages(value)
    if isinstance(value, dict):
        return _is_message(value)
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


def _holds_messages(text: str) -> bool:
    """Whether a text is a JSON list of messages; any other JSON is a text like all others."""
    if not re.match(r"\s*\[\s*\{", text):
        return False
    try:
        written = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return is_conversation(written) and all(map(_is_message, written))


def _is_message(value: dict[str, Any]) -> bool:
    return value.keys() >= {"role", "content"} or value.keys() >= {"from", "value"}


def prompt_field(fields: dict[str, Any], key: str) -> Prompt:
    """A field that must hold a prompt: a text, or messages that end with the user's or a tool's.
    A single message of the user is its text. Raises BadRow."""
    if not is_conversation(fields.get(key)):
        return text_field(fields, key)
    messages = _messages(fields, key)
    if not any(message["content"].strip() for message in messages):
        raise BadRow(f"field {key!r} has no text")
    if messages[-1]["role"] == "assistant":
        raise BadRow(f"field {key!r} cannot be a prompt: its last message is the assistant's")
    return as_prompt(messages)


def as_prompt(messages: list[Message]) -> Prompt:
    """Messages as a prompt."""
    is_text = len(messages) == 1 and messages[0]["role"] == "user"
    return messages[0]["content"] if is_text else messages


def answered_field(fields: dict[str, Any], key: str) -> tuple[list[Message], str]:
    """A field that must hold an answer: (the messages before it, its text). Raises BadRow."""
    if not is_conversation(fields.get(key)):
        return [], text_field(fields, key)
    *before, answer = _messages(fields, key)
    if answer["role"] != "assistant":
        raise BadRow(f"the last message of field {key!r} is not the assistant's")
    for name in ("tool_calls", *REASONING_FIELDS):
        if answer.get(name):
            hint = "write it into the content, as the model does; the dataset chat reads messages"
            raise BadRow(
                f"the answer in field {key!r} has {name}, but answers are texts", hint=hint
            )
    return before, answer["content"]


def text_of(prompt: Prompt) -> str:
    """The text of a prompt: of its last message, if it has several."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def messages_of(prompt: Prompt, system: str | None) -> list[Message]:
    """A prompt as messages. `system`: the system prompt, if it has none of its own."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _messages(fields: dict[str, Any], key: str) -> list[Message]:
    if key not in fields:
        raise MissingField(key, fields)
    written = fields[key]
    if isinstance(written, str):
        written = _parsed(written, f"field {key!r}")
    if isinstance(written, dict) and _is_message(written):
        written = [written]
    if not isinstance(written, list) or not written:
        raise BadRow(f"field {key!r} is not a list of messages")
    return [
        _message(message, f"message {number}") for number, message in enumerate(written, start=1)
    ]


def _message(written: Any, subject: str) -> Message:
    if not isinstance(written, dict):
        raise BadRow(f"{subject} is {kind_of(written)}, not an object with role and content")
    fields = {key: value for key, value in written.items() if value is not None}
    if "from" in fields and "role" not in fields:
        speaker = fields.pop("from")
        fields["role"] = SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker
        fields[CALL if speaker == CALL else "content"] = fields.pop("value", None)
    if not isinstance(fields.get("role"), str):
        raise BadRow(f"{subject} has no role; its fields are {sorted(written)}")
    if fields["role"] not in ROLES:
        raise _unknown_role(fields["role"], subject)
    fields["content"] = _text_of(fields.get("content"), subject)
    calls = [fields.pop(name, None) for name in ("tool_calls", CALL)]
    if called := next(filter(None, calls), None):  # an empty list would be calls to templates
        fields["tool_calls"] = _tool_calls(called, subject)
    elif not fields["content"].strip() and fields["role"] not in MAY_BE_EMPTY:
        raise BadRow(f"{subject}, of the {fields['role']}, is empty")
    return fields


def _unknown_role(role: str, subject: str) -> BadRow:
    near = get_close_matches(role.lower(), (*ROLES, *SHAREGPT), n=1)
    meant = SHAREGPT.get(near[0], near[0]) if near else None
    hint = f"did you mean {meant}?" if meant else f"roles are {', '.join(ROLES)}"
    return BadRow(f"{subject} has the role {role!r}, which chat templates do not know", hint=hint)


def _text_of(content: Any, subject: str) -> str:
    """The content of a message: a text, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [
        piece.get("text") if isinstance(piece, dict) and piece.get("type") == "text" else None
        for piece in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise BadRow(f"the content of {subject} is not text")
    return "".join(str(text) for text in texts)


def _tool_calls(calls: Any, subject: str) -> list[Any]:
    """The calls of a message, a single one too, in the form that all templates read."""
    if isinstance(calls, str):
        calls = _parsed(calls, f"a tool call of {subject}")
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow(f"tool_calls of {subject} is not a list of mappings")
    return [_tool_call(call, subject) for call in calls]


def _tool_call(call: dict[str, Any], subject: str) -> dict[str, Any]:
    """Name and arguments under `function`. Arguments given as JSON text are parsed, because
    templates serialise them themselves."""
    if "function" not in call:
        named = {key: call[key] for key in ("name", "arguments") if key in call}
        others = {key: value for key, value in call.items() if key not in named}
        call = {**others, "type": "function", "function": named}
    called = call["function"]
    if isinstance(called, dict) and isinstance(called.get("arguments"), str):
        arguments = _parsed(called["arguments"], f"a tool call of {subject}")
        call = {**call, "function": {**called, "arguments": arguments}}
    return call


def left_out(messages: Sequence[Message], text: str) -> str | None:
    """The first message, not the assistant's, whose last word is not in a text that a template has
    written of all; None if there is none."""
    for number, message in enumerate(messages, start=1):
        words = re.findall(r"\w+", message["content"])
        if message["role"] != "assistant" and words and words[-1] not in text:
            return f"message {number}, of the {message['role']}"
    return None


def trial_of(messages: Sequence[Message]) -> list[Message]:
    """The messages with a word of its own in place of each text: an answer often repeats what a
    tool returned, or how its reasoning ended, and a word may be the template's."""
    return [message | _trial_texts(message, number) for number, message in enumerate(messages)]


def shape_of(messages: Sequence[Message]) -> Hashable:
    """What decides which texts a template leaves out: kinds of messages, the first and the last."""
    last = len(messages) - 1
    return frozenset(
        (
            number == 0,
            number == last,
            message["role"],
            "tool_calls" in message,
            *_trial_texts(message, number),
        )
        for number, message in enumerate(messages)
    )


def _trial_texts(message: Message, number: int) -> Message:
    """A word for each field of a message that has a text."""
    fields = ("content", *REASONING_FIELDS)
    return {name: f"trial{number}{name}" for name in fields if str(message.get(name, "")).strip()}


def called_tools(message: Message) -> list[str]:
    """The names of the tools that a message of the assistant calls."""
    return tool_names(message.get("tool_calls") or [])


def tool_names(entries: Sequence[Any]) -> list[str]:
    """The names in calls of tools, or in their schemas."""
    functions = [entry.get("function", entry) for entry in entries]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


def reasoning_of(message: Message) -> str:
    """The reasoning of a message that has it in a field of its own, else nothing."""
    fields = (message.get(name) for name in REASONING_FIELDS)
    return next((text for text in fields if isinstance(text, str)), "")


def with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of tool calls as JSON text."""
    return [message | _calls_as_text(message) for message in messages]


def _calls_as_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {"tool_calls": [*map(_with_text, calls)]} if calls else {}


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    called = call.get("function")
    if not isinstance(called, dict) or not isinstance(called.get("arguments"), dict):
        return call
    arguments = json.dumps(called["arguments"], ensure_ascii=False)
    return call | {"function": called | {"arguments": arguments}}


def _tools(written: Any, key: str) -> list[Any] | None:
    tools = written
    if isinstance(written, str):  # tables write a blank text for no tools
        tools = _parsed(written, f"field {key!r}") if written.strip() else None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise BadRow(f"field {key!r} is not a list of tools")
    return tools or None


def _parsed(text: str, subject: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(f"{subject} is not JSON: {text!r:.60}") from None
