"""The name that was probably meant by one that is not among those that exist."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable

A_SLIP = 0.85
"""Words at least this similar count as a typo of each other, even if the word has a meaning
elsewhere."""
SIMILAR = 0.7
HARDLY_SIMILAR = 0.6
"""Enough for words whose first half is the same."""
SHORT = 4
"""Up to this many letters, similar letters alone say little: ppo is not dpo."""


def nearest_name(word: str, names: Iterable[str]) -> str | None:
    """The name that a word begins, that it is a typo of, or that it continues; else one that
    it is a part of, or the most similar one; None if none is near."""
    return next(iter(nearest_names(word, names)), None)


def nearest_names(word: str, names: Iterable[str]) -> list[str]:
    """The same; all of those that a word is a part of, as none of them is nearer than another."""
    candidates = list(names)
    same, plain, typo = _same(word, candidates), _plain(word), misspelt(word, candidates)
    if same is not None:
        return [same]
    begun = [name for name in candidates if len(plain) > 1 and _plain(name).startswith(plain)]
    continued = [name for name in candidates if _continues(plain, _plain(name))]
    typos = [typo] if typo is not None else []
    partly = [name for name in candidates if len(plain) > 2 and plain in _plain(name).split("_")]
    return [*begun, *typos, *continued][:1] or partly or _slips(word, candidates)[:1]


def _slips(word: str, names: list[str]) -> list[str]:
    """The names of which a word may be a misspelling, the most similar first."""
    swapped = [name for name in names if sorted(name) == sorted(word)]
    similar = difflib.get_close_matches(word, names, n=5, cutoff=SIMILAR)
    hardly = difflib.get_close_matches(word, names, n=5, cutoff=HARDLY_SIMILAR)
    similar += [name for name in hardly if _begin_alike(_plain(word), _plain(name))]
    return [name for name in (*swapped, *similar) if _is_slip(_plain(word), _plain(name))]


def misspelt(word: str, names: Iterable[str]) -> str | None:
    """The name of which a word is a typo, even if the word has a meaning elsewhere."""
    candidates = list(names)
    similar = difflib.get_close_matches(word, candidates, n=5, cutoff=A_SLIP)
    slips = (name for name in similar if _is_slip(_plain(word), _plain(name)))
    return _same(word, candidates) or next(slips, None)


def name_of_file(text: str, names: Iterable[str]) -> str | None:
    """The name, such as `base/ppo`, of a file that is written with its ending or other folders."""
    candidates, parts = list(names), re.sub(r"\.ya?ml$", "", text).split("/")
    ends = ["/".join(parts[first:]) for first in range(len(parts))]
    same = [name for name in candidates if name.rpartition("/")[2] == parts[-1]]
    return next((name for name in (*ends, *same) if name in candidates), None)


def did_you_mean(word: str, names: Iterable[str], otherwise: str | None = None) -> str | None:
    """The hint for a wrong name: the nearest ones, or something else if none is near."""
    near = nearest_names(word, names)
    *others, last = near or [""]
    alternatives = f"{', '.join(others)} or {last}" if others else last
    return f"did you mean {alternatives}?" if near else otherwise


def name_instead(word: str, names: Collection[str]) -> str | None:
    """The hint for a name that does not exist: the nearest ones, or else all that do."""
    return did_you_mean(word, names, f"there is {', '.join(names) or 'none'}")


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
