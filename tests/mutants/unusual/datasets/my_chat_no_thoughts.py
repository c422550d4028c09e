"""Conversations of a reasoning model without its thoughts, for supervised fine-tuning."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import BadRow, Row
from ._messages import Message, StoredConversation, read_conversation
from ._samples import answered_sample
from ._text_rows import FileRows
from ._turns import Masked, Speaker, Spoken, encode_turns, fit_turns

THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


@register_dataset("my_chat_no_thoughts")
@dataclass(kw_only=True)
class MyChatNoThoughts(FileRows):
    """Rows of messages. What the assistant's contain between `<think>` and `</think>` is left out;
    the rest is trained on, including the stop tokens."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""
    NEEDS_TEMPLATE: ClassVar[bool] = True
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"messages": [
            {"role": "user", "content": "What is 2+2?"},
            {"role": "assistant", "content": "<think>2 and 2.</think>\n4"},
            {"role": "user", "content": "And 3+3?"},
            {"role": "assistant", "content": "<think>3 and 3.</think>It is <think>hm</think> 6"},
        ]},
        {"messages": [
            {"role": "system", "content": "Answer in German."},
            {"role": "user", "content": "Good morning!"},
            {"role": "assistant", "content": "Guten Morgen! Schönen Tag."},
            {"role": "user", "content": "Write a tag."},
            {"role": "assistant", "content": "<think>\nShe wants a tag.\n</think>\n\n<b>"},
        ]},
    )  # fmt: skip

    messages_key: str = "messages"
    """Field that holds the list of messages."""

    keep: Literal["none", "last"] = "none"
    """Which thoughts remain: none, or those of the assistant's last message."""

    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's turns to train on."""

    _speaker: Speaker = field(init=False, repr=False)
    _rows: list[tuple[Row[Spoken], Masked]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._speaker = Speaker(self.util.tokenizer, self.train_on, "auto")
        super().__post_init__()

    def _encoded(self, rows: list[Row[Spoken]]) -> list[tuple[Row[Spoken], Masked]]:
        return self._within_limit(
            rows,
            encode_turns(self.util.tokenizer, rows),
            prompt=lambda row: row.content.conversation.prompt,
            length=lambda masked: len(masked.tokens),
            fit=fit_turns,
        )

    def __getitem__(self, index: int) -> SequenceSample:
        return answered_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        """The row in plain Python, so that `rlcli check` can inspect it without torch."""
        row, masked = self._rows[index]
        conversation, how = row.content.conversation, self._speaker.method
        tokens, trained = [list(masked.tokens)], [list(masked.trained)]
        return Preview(
            id=row.id,
            where=row.where,
            sequences=tokens,
            trained=trained,
            chat=True,
            prompt=conversation.prompt,
            system=conversation.system,
            masked_by=how,
        )

    def _read(self, fields: dict[str, Any]) -> Spoken:
        stored = read_conversation(fields, self.messages_key, "tools", None)
        cleared = stored.turns[:-1] if self.keep == "last" else stored.turns
        messages = [_cleared(m) if n in cleared else m for n, m in enumerate(stored.messages)]
        return self._speaker.speak(StoredConversation(messages, stored.tools))


def _cleared(message: Message) -> Message:
    content = THOUGHT.sub("", message["content"]).strip()
    if not content and not message.get("tool_calls"):
        raise BadRow("a message of the assistant is nothing but thoughts")
    return message | {"content": content}
