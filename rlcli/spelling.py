"""The name that was probably meant by one that is not among those that exist."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

A_SLIP = 0.85
"""Words at least this similar count as a typo of each other, even if the word has a meaning
elsewhere."""
SIMILAR = 0.7
A_LITTLE_SIMILAR = 0.6
"""Enough for words whose first half is the same."""
SHORT = 4
"""Up to this many letters, similar letters alone say little: ppo is not dpo."""


def nearest_name(word: str, names: Iterable[str]) -> str | None:
    """The name that a word begins, that it is a typo of, or that it continues; else the most
    similar one, or one that it is a part of; None if none is near."""
    candidates = list(names)
    same = _same(word, candidates)
    if same is not None:
        return same
    plain = _plain(word)
    begun = [name for name in candidates if len(plain) > 1 and _plain(name).startswith(plain)]
    continued = [name for name in candidates if _continues(plain, _plain(name))]
    partly = [name for name in candidates if len(plain) > 2 and plain in _plain(name).split("_")]
    similar = difflib.get_close_matches(word, candidates, n=5, cutoff=SIMILAR)
    less = difflib.get_close_matches(word, candidates, n=5, cutoff=A_LITTLE_SIMILAR)
    similar += [name for name in less if _begin_alike(plain, _plain(name))]
    swapped = [name for name in candidates if sorted(name) == sorted(word)]
    slips = [name for name in (*swapped, *similar) if _is_slip(plain, _plain(name))]
    typo = misspelt(word, candidates)
    typos = [typo] if typo is not None else []
    return next(iter((*begun, *typos, *continued, *slips, *partly)), None)


def misspelt(word: str, names: Iterable[str]) -> str | None:
    """The name of which a word is a typo, even if the word has a meaning elsewhere."""
    candidates = list(names)
    similar = difflib.get_close_matches(word, candidates, n=5, cutoff=A_SLIP)
    slips = (name for name in similar if _is_slip(_plain(word), _plain(name)))
    return _same(word, candidates) or next(slips, None)


def did_you_mean(word: str, names: Iterable[str], otherwise: str | None = None) -> str | None:
    """The hint for a wrong name: the nearest one, or something else if none is near."""
    near = nearest_name(word, names)
    return f"did you mean {near}?" if near else otherwise


def _plain(word: str) -> str:
    return unicodedata.normalize("NFKC", word).lower().replace("-", "_")


def _same(word: str, names: list[str]) -> str | None:
    return next((name for name in names if _plain(name) == _plain(word)), None)


def _continues(word: str, name: str) -> bool:
    """Whether a word is a name with something added: `evaluate`, `lst`."""
    added = len(word) - len(name)
    return word.startswith(name) and (len(name) > 2 or (len(name) == 2 and added == 1))


def _is_slip(word: str, name: str) -> bool:
    """Whether similar words may be the same one, misspelt: they begin alike, and if the word is
    short, a letter was lost, added or swapped, or only the second half differs."""
    swapped = sorted(word) == sorted(name)
    if word[:1] != name[:1]:
        return swapped and word[:2] == name[1::-1]
    if len(word) > SHORT or swapped:
        return True
    shorter, longer = sorted((word, name), key=len)
    lost = any(longer[:at] + longer[at + 1 :] == shorter for at in range(len(longer)))
    return lost or _begin_alike(word, name)


def _begin_alike(word: str, name: str) -> bool:
    half = (len(word) + 1) // 2
    return word[:half] == name[:half]
