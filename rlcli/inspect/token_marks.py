"""The tokens of a row, each with its text and whether it is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlcli.api.data import Preview
from rlcli.errors import escape_control

BROKEN = "\N{REPLACEMENT CHARACTER}"
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
            for id_, text, trained in zip(ids, _texts(ids, tokenizer), mask, strict=True)
        ]
        for ids, mask in zip(preview.sequences, masks, strict=True)
    ]


def _texts(ids: Sequence[int], tokenizer: Any) -> Iterator[str]:
    """The text that each token adds. It depends on the preceding tokens: on spaces,
    and on bytes of one character."""
    start = shown = 0
    for position in range(len(ids)):
        before, after = (
            tokenizer.decode(list(ids[start:shown])),
            tokenizer.decode(list(ids[start : position + 1])),
        )
        is_open = after.endswith(BROKEN) and position + 1 < len(ids) and position - shown < 4
        if is_open:
            yield ""
            continue
        yield after[len(before) :]
        start, shown = shown, position + 1


def runs(tokens: Sequence[Token]) -> Iterator[tuple[bool, list[Token]]]:
    """(whether it is trained on, tokens) of each stretch."""
    for trained, group in groupby(tokens, key=lambda token: token.trained):
        yield trained, list(group)
