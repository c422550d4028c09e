"""Shared by datasets whose prompts a library makes."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.data import DatasetUtility, Preview, SequenceSample
from rlcli.api.key_meaning import MESSAGES

from ._messages import Prompt, messages_of, text_of
from ._rendering import encode_prompts, uses_chat
from ._samples import prompt_sample


@dataclass(frozen=True)
class MadePrompt:
    """A row."""

    id: str
    content: Prompt
    metadata: dict[str, Any]


@dataclass(kw_only=True)
class MadePrompts:
    """Prompts with what an environment needs to play or score them."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _make(self, index: int) -> MadePrompt:
        """A row, the same each time."""

    def __getitem__(self, index: int) -> SequenceSample:
        return prompt_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, tokenizer = copy.deepcopy(self._make(range(len(self))[index])), self.util.tokenizer
        is_chat, messages = uses_chat(tokenizer, "auto"), messages_of(row.content, None)
        return Preview(
            id=row.id,
            sequences=encode_prompts(tokenizer, [row.content], chat="auto"),
            prompt=text_of(row.content),
            messages=messages,
            chat=is_chat,
            metadata=row.metadata | ({MESSAGES: messages} if is_chat else {}),
        )
