"""Names of special tokens in the content of messages, kept from being read as special tokens.

A message may say `<|im_end|>`: as text, because somebody writes about it, or because a policy tries
to end its turn and to write the next one itself. Only the chat template writes special tokens. So a
mark is put into the names that messages contain before the template sees them, and the text is
split at the marks when it is tokenized.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

MARK = "\ufdd0"
"""A character that no text may contain: Unicode reserves it for the internal use of programs."""

Span = tuple[int, int]

AT_ONCE = 256
"""Texts that a tokenizer gets at once."""

_TURN = re.compile(r"<[|｜].*[|｜]>")
"""Names that structure conversations, in some models without being declared special."""


@dataclass(frozen=True)
class _Special:
    """The special tokens of a tokenizer."""

    names: re.Pattern[str] | None
    """Finds their names, except those of one character, which cannot be split."""
    normalized: frozenset[int]
    """Ids of those that the tokenizer finds in other spellings too: it compares them with the
    normalized text."""


_special: WeakKeyDictionary[Any, _Special] = WeakKeyDictionary()


def as_content(tokenizer: Any, value: Any) -> Any:
    """A text, or a message with all its texts, with a mark in each name of a special token."""
    if isinstance(value, str):
        return _without_special(tokenizer, value)
    if isinstance(value, Mapping):
        return {
            as_content(tokenizer, key): as_content(tokenizer, field) for key, field in value.items()
        }
    if isinstance(value, list | tuple):
        return [as_content(tokenizer, field) for field in value]
    return value


def unmarked(text: str) -> str:
    """The text as its author wrote it."""
    return text.replace(MARK, "")


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of rendered texts, without any that the tokenizer would add."""
    return [ids for ids, _ in _encoded(tokenizer, texts)]


def tokens_with_offsets(
    tokenizer: Any, texts: Sequence[str]
) -> Iterator[tuple[list[int], list[Span]]]:
    """The tokens of rendered texts, each with the [start, end) of its characters, marks included.

    Raises NotImplementedError for a tokenizer that cannot say which these are.
    """
    return _encoded(tokenizer, texts, return_offsets_mapping=True)


def in_parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Texts, as many as a tokenizer gets at once: what it returns takes many times the memory of
    the token ids."""
    return (texts[start : start + AT_ONCE] for start in range(0, len(texts), AT_ONCE))


def _encoded(
    tokenizer: Any, texts: Sequence[str], **how: bool
) -> Iterator[tuple[list[int], list[Span]]]:
    """The tokens of texts, with their offsets if these are asked for. Equal ids are one object:
    rows of millions of tokens are kept."""
    shared_ids: dict[int, int] = {}
    for some_texts in in_parts(texts):
        for ids, spans in _encoded_at_once(tokenizer, some_texts, **how):
            yield list(map(shared_ids.setdefault, ids, ids)), spans


def _encoded_at_once(
    tokenizer: Any, texts: Sequence[str], **how: bool
) -> list[tuple[list[int], list[Span]]]:
    pieces = [(number, piece) for number, text in enumerate(texts) for piece in _pieces(text)]
    encodings: list[tuple[list[int], list[Span]]] = [([], []) for _ in texts]
    if not pieces:
        return encodings
    encoded = tokenizer([text for _, (_, text) in pieces], add_special_tokens=False, **how)
    offsets = encoded.offset_mapping if how else [[]] * len(pieces)
    for (number, (begin, _)), ids, spans in zip(pieces, encoded.input_ids, offsets, strict=True):
        encodings[number][0].extend(ids)
        encodings[number][1].extend((begin + start, begin + end) for start, end in spans)
    return encodings


def _pieces(text: str) -> list[tuple[int, str]]:
    """The parts between marks, each with its place in the text."""
    begin, pieces = 0, []
    for piece in text.split(MARK):
        if piece:
            pieces.append((begin, piece))
        begin += len(piece) + len(MARK)
    return pieces


def _without_special(tokenizer: Any, text: str) -> str:
    special, text = _special_of(tokenizer), unmarked(text)
    while special.names is not None:
        broken = special.names.sub(lambda name: f"{name[0][0]}{MARK}{name[0][1:]}", text)
        if broken == text:
            break
        text = broken  # names may overlap
    while special.normalized and (offsets := _inside_special(tokenizer, text, special.normalized)):
        for offset in reversed(offsets):
            text = f"{text[:offset]}{MARK}{text[offset:]}"
    return text


def _inside_special(tokenizer: Any, text: str, special: frozenset[int]) -> list[int]:
    """The offsets at which spellings of special tokens in a text can be split, in order."""
    ((ids, spans),) = tokens_with_offsets(tokenizer, [text])
    split = zip(ids, spans, strict=True)
    return [begin + 1 for id_, (begin, end) in split if id_ in special and end - begin > 1]


def _special_of(tokenizer: Any) -> _Special:
    if tokenizer not in _special:
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        special = {
            id_: token for id_, token in added if token.special or _TURN.fullmatch(token.content)
        }
        names = sorted(
            {token.content for token in special.values() if len(token.content) > 1},
            key=len,
            reverse=True,
        )
        pattern = re.compile("|".join(map(re.escape, names))) if names else None
        backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(
            tokenizer, "backend", None
        )
        normalizes = getattr(backend, "normalizer", None) is not None
        normalized = frozenset(
            id_ for id_, token in special.items() if normalizes and token.normalized
        )
        _special[tokenizer] = _Special(pattern, normalized)
    return _special[tokenizer]
