"""The sequences of tokens in a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.api.preview import preview_of
from rlcli.testing.dataset_checks.trial import read

TOKENS = ("packed_input_ids", "packed_prompts")
"""Keys that hold token ids."""


@dataclass(frozen=True)
class TokenSequence:
    """A sequence, and which of its tokens are trained on."""

    tokens: list[int]
    trained: list[bool]
    is_answered: bool
    """False for a prompt without a response."""

    @property
    def prompt(self) -> list[int]:
        """The tokens that are not trained on."""
        flagged = zip(self.tokens, self.trained, strict=True)
        return [token for token, is_trained in flagged if not is_trained]

    @property
    def answer(self) -> list[int]:
        """The tokens that are trained on."""
        flagged = zip(self.tokens, self.trained, strict=True)
        return [token for token, is_trained in flagged if is_trained]


def sequences_of(sample: SequenceSample) -> list[TokenSequence]:
    """Those of a sample; none of one that holds no tokens."""
    if not set(TOKENS) & sample.keys:
        return []
    row = preview_of(sample)
    if row.trained is None:
        return [TokenSequence(tokens, [False] * len(tokens), False) for tokens in row.sequences]
    flagged = zip(row.sequences, row.trained, strict=True)
    return [TokenSequence(tokens, list(trained), True) for tokens, trained in flagged]


def sequences_in(dataset: Any) -> Iterator[tuple[int, TokenSequence]]:
    """(the number of its row, a sequence) of its first rows."""
    for index, sample in enumerate(read(dataset)):
        yield from ((index, sequence) for sequence in sequences_of(sample))


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """A text without its special tokens."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


def decoded(dataset: Any, tokenizer: Any) -> str:
    """The text of all tokens of its first rows."""
    return "\n".join(tokenizer.decode(sequence.tokens) for _, sequence in sequences_in(dataset))
