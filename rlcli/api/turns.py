"""Conversations as tokens: what a model sampled stays as it is, only new messages are rendered.

A sampled turn is never decoded and tokenized again. The messages that follow it are rendered by the
template's own difference: the conversation with the turn and the new messages must begin with the
text of the tokens so far, and what comes after that is tokenized and appended. A token that ends a
turn is thereby written once: by the model if it sampled it, by the template if the response was cut
off.

Where the conversation begins differently, the template rewrites what was there: it drops the
reasoning of earlier turns, or moves the tools. The tokens so far are then not what the model would
see next. Differences in blanks alone do not count: a template that strips a turn would otherwise
rewrite nearly all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcli.api.chat_template import (
    DAY,
    conversation_text,
    name_of,
    opens_reasoning,
    shared_length,
)
from rlcli.api.special_tokens import MARK, as_content, tokens_of, unmarked
from rlcli.api.tool_formats import PROBE, Parsed, call_id
from rlcli.errors import ModelError

Message = Mapping[str, Any]
OnRewrite = Literal["fork", "refuse"]
Span = tuple[int, int]

_INVISIBLE = re.compile(rf"[\s{MARK}]+")
_VISIBLE = re.compile(rf"[^\s{MARK}]+")


@dataclass
class TokenRow:
    """A sequence to train on. Each sampled turn is in one row only: in a row that was forked, the
    turns before are context."""

    ids: list[int]
    turns: list[Span] = field(default_factory=list)
    """[start, end) of what was sampled, in tokens, in order."""

    def append_turn(self, ids: Sequence[int]) -> None:
        """A turn as it was sampled."""
        self.turns.append((len(self.ids), len(self.ids) + len(ids)))
        self.ids.extend(ids)


@dataclass(frozen=True)
class Extension:
    """What new messages have added to a conversation, up to where the model writes next."""

    ids: list[int]
    """Tokens that continue the row; if `forked`, all tokens of a new row."""
    forked: bool = False
    """Whether the template rewrote earlier turns, so that a new row begins."""
    shared: int = 0
    """Tokens at the start of a forked row that are those of the row before."""


class Conversation:
    """A conversation of a model, turn by turn.

    `append_sampled` and `append_messages` alternate. Raises ModelError F32 where the template
    fails, or rewrites earlier turns although `on_rewrite` is "refuse".
    """

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        on_rewrite: OnRewrite = "fork",
    ):
        """`tokenizer`: transformers' or ours, with a chat template. `messages`: those before the
        first turn. `tools`: JSON schemas of the tools that the model may call."""
        self._tokenizer = tokenizer
        self._tools = as_content(tokenizer, tools)
        self._on_rewrite = on_rewrite
        self._messages: list[Message] = list(messages)
        self._turn: str | None = None  # sampled, and followed by nothing yet
        self._writes_results: bool | None = None  # not known before there are any
        self._text = self._rendered(self._messages)
        self.rows = [TokenRow(tokens_of(tokenizer, [self._text])[0])]
        """The rows so far; the last one is in progress."""

    @property
    def ids(self) -> list[int]:
        """The tokens that the model continues: those of the row in progress."""
        return self.rows[-1].ids

    @property
    def forks(self) -> int:
        """How many times the template rewrote earlier turns."""
        return len(self.rows) - 1

    @property
    def in_reasoning(self) -> bool:
        """Whether the model continues reasoning that the template has opened."""
        return opens_reasoning(self._text)

    def append_sampled(self, ids: Sequence[int]) -> str:
        """A turn as it was sampled, with the token that ended it if one did. Returns its text
        without that token, with the names of other special tokens."""
        if self._turn is not None:
            raise ValueError("two turns without a message between them")
        self.rows[-1].append_turn(ids)
        ends = self._ends(ids)
        self._turn = self._decoded(ids[:-1] if ends else ids)
        self._text += self._turn + (self._name_of(ids[-1]) if ends else "")
        return self._turn

    def append_messages(
        self, messages: Sequence[Message], turn: Message | None = None
    ) -> Extension:
        """Messages that follow a sampled turn: results of tools, or the user's. After them the
        model's next turn begins. Results are one message of the user if the template refuses or
        ignores the role `tool`.

        `turn`: the sampled turn as templates expect it, with `content` and `tool_calls`
        (`Parsed.message`). Where the template writes it differently than it was sampled, and
        without it, the turn is a message with its text.
        """
        if self._turn is None or not messages:
            raise ValueError("messages follow a sampled turn; pass all of them at once")
        messages = self._writable(messages)
        refused: ModelError | None = None
        rewritten: list[tuple[list[Message], str]] = []
        for reading in _readings(self._turn, turn):
            history = [*self._messages, reading, *messages]
            try:
                text = self._rendered(history)
            except ModelError as error:
                refused = refused or error
                continue
            rest = continuation(self._text, text)
            if rest is not None:
                return self._continued(history, rest)
            rewritten.append((history, text))
        if not rewritten:
            assert refused is not None
            raise refused
        return self._forked(*max(rewritten, key=lambda each: self._shared(each[1])))

    def _writable(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with roles that the template writes."""
        if all(message["role"] != "tool" for message in messages):
            return messages
        if self._writes_results is None:
            self._writes_results = writes_results(self._tokenizer, self._tools)
        if self._writes_results:
            return messages
        content = "\n".join(str(message["content"]) for message in messages)
        return [{"role": "user", "content": content}]

    def _continued(self, history: list[Message], rest: str) -> Extension:
        extension = Extension(self._tokens_after(self.ids, rest))
        self.ids.extend(extension.ids)
        self._advance(history, self._text + rest)
        return extension

    def _forked(self, history: list[Message], text: str) -> Extension:
        if self._on_rewrite == "refuse":
            raise self._refusal(text)
        ids = tokens_of(self._tokenizer, [text])[0]
        extension = Extension(list(ids), forked=True, shared=shared_length(self.ids, ids))
        self.rows.append(TokenRow(ids))
        self._advance(history, text)
        return extension

    def _advance(self, history: list[Message], text: str) -> None:
        self._messages, self._text, self._turn = history, text, None

    def _tokens_after(self, before: Sequence[int], text: str) -> list[int]:
        """The tokens of a text that follows these. If the last of them is a special one, both are
        tokenized together: some tokenizers write a blank before the first word of a text only."""
        if self._ends(before):
            ids = tokens_of(self._tokenizer, [self._name_of(before[-1]) + text])[0]
            if ids[0] == before[-1]:
                return ids[1:]
        return tokens_of(self._tokenizer, [text])[0]

    def _ends(self, ids: Sequence[int]) -> bool:
        """Whether the last token is a special one."""
        if not ids:
            return False
        token = self._tokenizer.added_tokens_decoder.get(ids[-1])
        return ids[-1] == self._tokenizer.eos_token_id or (token is not None and token.special)

    def _name_of(self, id_: int) -> str:
        """The text of a special token, which some decoders would change."""
        token = self._tokenizer.added_tokens_decoder.get(id_)
        return self._decoded([id_]) if token is None else str(token.content)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _rendered(self, messages: Sequence[Message]) -> str:
        """With marks in the names of special tokens that messages contain."""
        return conversation_text(
            self._tokenizer, messages, tools=self._tools, add_generation_prompt=True, day=DAY
        )

    def _shared(self, text: str) -> int:
        """Visible characters at the start of a text that are those of the row."""
        return shared_length(_visible(self._text), _visible(text))

    def _refusal(self, text: str) -> ModelError:
        same = self._shared(text)
        before, after = (
            unmarked(each)[max(_behind(unmarked(each), same) - 10, 0) :][:40]
            for each in (self._text, text)
        )
        return ModelError(
            f"the chat template of {name_of(self._tokenizer)} rewrites earlier turns: what the "
            f"model saw and wrote reads {before!r}, and {after!r} in the conversation that follows",
            hint="use a template that keeps earlier turns, or set on_rewrite: fork, which trains "
            "on each turn after what the model had seen then",
            code="F32",
        )


def writes_results(tokenizer: Any, tools: Sequence[Any] | None = None) -> bool:
    """Whether the tokenizer's chat template writes messages of the role `tool`, instead of refusing
    or ignoring them. Found by trial, after a turn with a call and after one without."""
    result = {"role": "tool", "name": PROBE.name, "tool_call_id": call_id(0), "content": "trial 93"}
    for turn in (Parsed("", (PROBE,)).message, {"role": "assistant", "content": "answer"}):
        messages = [{"role": "user", "content": "?"}, turn, result]
        try:
            text = conversation_text(
                tokenizer, messages, tools=tools, add_generation_prompt=True, day=DAY
            )
        except ModelError:
            continue
        if result["content"] in unmarked(text):
            return True
    return False


def _readings(text: str, turn: Message | None) -> Iterator[Message]:
    """The messages as which a template may write a turn as it was sampled: with its reasoning in a
    field, which some templates demand because the prompt opens it, and without."""
    verbatim = {"role": "assistant", "content": text}
    for message in [verbatim] if turn is None else [turn, verbatim]:
        thought, end, answer = message["content"].partition("</think>")
        if end:
            thought = thought.strip().removeprefix("<think>").strip()
            yield {**message, "reasoning_content": thought, "content": answer.strip()}
        yield message


def continuation(beginning: str, text: str) -> str | None:
    """What a rendered text adds to its beginning; None if it begins differently. Differences in
    blanks, and marks of special tokens, do not count."""
    visible = _visible(beginning)
    if not _visible(text).startswith(visible):
        return None
    rest = text[_behind(text, len(visible)) :]
    blanks = len(rest) - len(rest.lstrip())
    while not beginning.endswith(rest[:blanks]):
        blanks -= 1
    return rest[blanks:]


def _visible(text: str) -> str:
    return _INVISIBLE.sub("", text)


def _behind(text: str, count: int) -> int:
    """The place in a text behind its first `count` visible characters."""
    if not count:
        return 0
    for word in _VISIBLE.finditer(text):
        count -= word.end() - word.start()
        if count <= 0:
            return word.end() + count
    return len(text)
