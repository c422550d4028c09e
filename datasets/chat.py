"""Conversations of any number of turns, for supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import Row
from ._messages import read_conversation
from ._samples import answered_sample
from ._text_rows import FileRows
from ._turns import Masked, Speaker, Spoken, encode_turns, fit_turns


@register_dataset("chat")
@dataclass(kw_only=True)
class Chat(FileRows):
    """Rows of messages, each with a role and content; the assistant's messages are trained on,
    including their stop tokens."""

    ELSEWHERE: ClassVar[str] = "messages conversation conversations sharegpt chatml"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""
    NEEDS_TEMPLATE: ClassVar[bool] = True
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "messages": [
                {"role": "user", "content": "What is 2+2?"},
                {"role": "assistant", "content": "4"},
            ]
        },
        {
            "messages": [
                {"role": "system", "content": "Answer in German."},
                {"role": "user", "content": "Good morning!"},
                {"role": "assistant", "content": "Guten Morgen! Schönen Tag."},
                {"role": "user", "content": "And good night?"},
                {"role": "assistant", "content": "Gute Nacht."},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Name a colour.\nOnly one."},
                {"role": "assistant", "content": "red"},
                {"role": "user", "content": "Thank you."},
            ]
        },
        {
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
            "messages": [
                {"role": "user", "content": "What is 17+25?"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "add", "arguments": '{"a": 17, "b": 25}'}}
                    ],
                },
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "It is 42."},
            ],
        },
    )
    SAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "answers": ["4"]},
        {
            "prompt": "Answer in German.Good morning!And good night?",
            "answers": ["Guten Morgen! Schönen Tag.Gute Nacht."],
        },
    )

    messages_key: str = "messages"
    """Field that holds the list of messages: `{role, content}`, or `{from,
    value}` as in ShareGPT."""

    tools_key: str = "tools"
    """Field that holds the tools the assistant may call, if a row has any."""

    system: str | None = None
    """System prompt for conversations without one of their own."""

    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's turns to train on."""

    mask: Literal["auto", "markers", "prefix"] = "auto"
    """How to find them: by the template's `{% generation %}` markers, or by rendering the
    conversation up to each turn; auto: by markers if the template has any."""

    _speaker: Speaker = field(init=False, repr=False)
    _rows: list[tuple[Row[Spoken], Masked]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._speaker = Speaker(self.util.tokenizer, self.train_on, self.mask)
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
        row, masked = self._rows[index]
        conversation = row.content.conversation
        return Preview(
            id=row.id,
            where=row.where,
            sequences=[list(masked.tokens)],
            trained=[list(masked.trained)],
            prompt=conversation.prompt,
            system=conversation.system,
            chat=True,
            masked_by=self._speaker.method,
        )

    def _read(self, fields: dict[str, Any]) -> Spoken:
        return self._speaker.speak(
            read_conversation(fields, self.messages_key, self.tools_key, self.system)
        )
