"""Rows of a dataset in plain Python: what their samples are made from, and what can be looked at without torch.

A dataset may offer two methods beside `__getitem__`: `preview(index) -> Preview` and `survey() -> Survey`. It then
promises to ask its tokenizer for no more than `rlcli.checkpoint.light_tokenizer` gives: token ids of texts, the chat
template, the ids of special tokens. `rlcli check` and `rlcli tokens` use them; datasets without them work too, slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Preview:
    """One row: a prompt that waits for a response, or sequences with the tokens that are trained on."""

    id: str
    """The id of the row's sample."""
    where: str | None = None
    """`path:line`, if the row comes from a file."""
    sequences: Sequence[list[int]]
    """Token ids: of the prompt alone, or of the prompt with each of its answers."""
    trained: Sequence[list[bool]] | None = None
    """For each token of each sequence, whether it is trained on. None: a response follows the prompt."""
    prompt: str | None = None
    """The prompt's words, before a template or a system prompt is put around them."""
    system: str | None = None
    """The system prompt."""
    answers: Sequence[str] = ()
    """The words of the answer that each sequence ends with."""
    chat: bool = False
    """Whether the tokenizer's chat template wrote the prompt."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the sample's metadata hold, such as `answer`, with which a reward compares a response."""

    @classmethod
    def answered(cls, prompt_tokens: list[int], answer_tokens: Sequence[list[int]], **row: Any) -> Preview:
        """A prompt with one or several answers; the answers are trained on."""
        return cls(
            sequences=[[*prompt_tokens, *answer] for answer in answer_tokens],
            trained=[[False] * len(prompt_tokens) + [True] * len(answer) for answer in answer_tokens],
            **row,
        )


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a dataset knows of all its rows, those that it leaves out included."""

    lengths: Sequence[int]
    """Tokens of every row that could be read, before any is dropped or cut; of several answers, the longest."""
    prompts: Sequence[tuple[str, str]]
    """(where it is, its prompt's words) of every row that could be read."""
    max_length: int
    """Longer rows are dropped, cut or refused."""
    overlong: str
    """What becomes of them: the dataset's `overlong`."""
    bad_rows: Sequence[str] = ()
    """`path:line: what is wrong` of every row that could not be read."""

    @property
    def too_long(self) -> int:
        """How many rows are longer than `max_length`."""
        return sum(length > self.max_length for length in self.lengths)
