"""The tokens of a row, each with its text and whether it is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlcli.api.data import Preview
from rlcli.api.token_texts import token_texts
from rlcli.errors import escape_control

LINE_END = "⏎"


@dataclass(frozen=True)
class Token:
    """One token of a sequence."""

    id: int
    text: str
    """What it adds to the text; if several tokens form one character,
    the last of them has that character."""
    trained: bool
    special: bool
    """A token with a special role, such as the end of sequence, rather than text."""

    @property
    def shown(self) -> str:
        """The text, safe to print: line ends visible, control characters escaped."""
        return escape_control(self.text.replace("\n", LINE_END + "\n"))


def tokens_of(preview: Preview, tokenizer: Any) -> list[list[Token]]:
    """The tokens of each sequence of a row."""
    masks = preview.trained or [[False] * len(ids) for ids in preview.sequences]
    special = frozenset(tokenizer.all_special_ids)
    return [
        [
            Token(id_, text, trained, id_ in special)
            for id_, text, trained in zip(ids, token_texts(ids, tokenizer), mask, strict=True)
        ]
        for ids, mask in zip(preview.sequences, masks, strict=True)
    ]


def runs(tokens: Sequence[Token]) -> Iterator[tuple[bool, list[Token]]]:
    """(whether it is trained on, tokens) of each stretch."""
    for trained, group in groupby(tokens, key=lambda token: token.trained):
        yield trained, list(group)
