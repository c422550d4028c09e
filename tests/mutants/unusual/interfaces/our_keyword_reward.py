"""Rule-based reward: how many of the row's keywords does a response mention, and does it avoid what
it must not say?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import Example
from rlcli.api.limits import Limits
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, register_interface
from rlcli.errors import DataError

from .rewards._scores import one_each
from .rewards._text import response_texts


@dataclass(kw_only=True)
class KeywordReward(ModelInterface):
    """The share of the row's `keywords` that a response mentions as whole words, in any case, less
    a penalty for each of the row's `forbidden` words that it mentions."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    LIMITS: ClassVar[Limits] = {"forbidden_penalty": {"ge": 0}}
    EXAMPLES: ClassVar[tuple[Example, ...]] = (
        {
            "row": {"keywords": ["Paris", "Seine"], "forbidden": ["London"]},
            "right": "paris lies on the Seine.",
            "wrong": "Paris, Paris, Paris! Or London?",
        },
        {
            "row": {"keywords": ["art", "old town", "Käse"]},
            "right": "Art, käse and an old town.",
            "wrong": "A party in a town.",
        },
    )

    forbidden_penalty: float = 0.5
    """Subtracted for each forbidden word that a response mentions."""

    def score(self, response: str, keywords: Sequence[str], forbidden: Sequence[str]) -> float:
        """At most 1, for all keywords and no forbidden word."""
        text = response.casefold()
        found = sum(_mentions(text, word) for word in keywords)
        share = found / max(len(keywords), 1)
        return share - self.forbidden_penalty * sum(_mentions(text, word) for word in forbidden)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` [N] float32."""
        rows = [row for row, group in enumerate(data.seqlens["packed_input_ids"]) for _ in group]
        rewards = [
            self.score(text, _words(data, "keywords", row), _words(data, "forbidden", row, []))
            for text, row in zip(response_texts(model.data_tokenizer, data), rows, strict=True)
        ]
        return one_each(data, {"rewards": torch.tensor(rewards, dtype=torch.float32)}, {})


def _mentions(text: str, word: str) -> bool:
    """Whether a text, in lower case, holds a word or a phrase."""
    return re.search(rf"(?<!\w){re.escape(word.casefold())}(?!\w)", text) is not None


def _words(data: SequenceSample, name: str, row: int, default: Any = None) -> list[str]:
    """A field of a row. Raises DataError for one that is no list of words."""
    value = data.metadata[name][row] if name in data.metadata else None
    words = default if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        message = f"sample {data.ids[row]} has no list of words in its field {name}"
        raise DataError(message, hint="this reward needs rows with keywords", code="F31")
    return words


register_interface("our_keyword_reward", KeywordReward)
