"""Texts that a model without a chat template continues, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcli.api.chat_template import opens_reasoning
from rlcli.api.special_tokens import as_content, tokens_of
from rlcli.api.turns import Extension, Message, TokenRow

LONGEST_OPENING = 32
"""Tokens at the end of a text that may open reasoning: `<think>`, and blanks after it."""


class PlainTurns:
    """A text that turns and messages continue as they are: what `Conversation` is for tokenizers
    with a template. Names of special tokens in messages are plain text."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self.rows = [TokenRow(list(prompt))]
        """Always one: nothing rewrites it."""

    @property
    def ids(self) -> list[int]:
        """The tokens that the model continues."""
        return self.rows[0].ids

    @property
    def in_reasoning(self) -> bool:
        """Whether the model continues reasoning that the text has opened."""
        return opens_reasoning(self._decoded(self.ids[-LONGEST_OPENING:]))

    def append_sampled(self, ids: Sequence[int]) -> str:
        """A turn as it was sampled. Returns its text without special tokens."""
        self.rows[0].append_turn(ids)
        return self._decoded(ids)

    def append_messages(
        self, messages: Sequence[Message], turn: Message | None = None
    ) -> Extension:
        """The contents of messages; what a tool returns is a line, and so is nothing at all: the
        next turn would continue the one before, as if they were one."""
        texts = [
            f"{message['content']}\n" if message["role"] == "tool" else message["content"]
            for message in messages
        ]
        (ids,) = tokens_of(self._tokenizer, [as_content(self._tokenizer, "".join(texts) or "\n")])
        self.ids.extend(ids)
        return Extension(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
