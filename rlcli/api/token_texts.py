"""The tokens of a tokenizer: their ids, and the text that each of a sequence adds to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

BROKEN = "\N{REPLACEMENT CHARACTER}"
LONGEST = 4
"""Tokens of one character."""


def id_count(tokenizer: Any) -> int:
    """One more than the largest id: the rows that an embedding needs. That may be more than the
    tokens, as some vocabularies skip ids before their special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", ())
    return max([len(tokenizer), *(id_ + 1 for id_ in added)])


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """For each token its text; together they are the text of all. If several tokens form one
    character, the last of them has that character."""
    alone = [str(tokenizer.decode([id_])) for id_ in ids]
    if "".join(alone) == tokenizer.decode(list(ids)):
        return alone
    return list(_in_context(ids, tokenizer))


def _in_context(ids: Sequence[int], tokenizer: Any) -> Iterator[str]:
    """The same where a text depends on the tokens before it: on spaces, and on bytes of one
    character."""
    start = shown = 0
    for position in range(len(ids)):
        before = tokenizer.decode(list(ids[start:shown]))
        after = tokenizer.decode(list(ids[start : position + 1]))
        is_last = position + 1 == len(ids)
        if after.endswith(BROKEN) and not is_last and position - shown < LONGEST:
            yield ""
            continue
        yield after[len(before) :]
        start, shown = shown, position + 1
