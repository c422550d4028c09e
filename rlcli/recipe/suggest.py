"""Suggestions for a wrong name: the nearest one, the same one elsewhere,
or another framework's word."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import takewhile

from pydantic import BaseModel

from rlcli.recipe.schema_types import named_section_of, section_of
from rlcli.recipe.synonyms import absent, called_here, translated
from rlcli.spelling import misspelt, nearest_name

LOOKALIKES = dict(
    zip("аеорсухіјѕԁӏһԛԝьΑΒΕΖΗΙΚΜΝΟΡΤΥΧοαι", "aeopcyxijsdlhqwbABEZHIKMNOPTYXoai", strict=True)
)
"""Cyrillic and Greek letters that look like Latin ones."""

Suggestion = tuple[str, str]
"""(message id, hint) for an unknown key."""


def lookalike(word: str) -> tuple[str, str] | None:
    """(the word in Latin letters, the foreign characters as U+XXXX),
    or None if all letters are Latin."""
    if word.isascii():
        return None
    latin = "".join(LOOKALIKES.get(c, c) for c in unicodedata.normalize("NFKC", word))
    foreign = ", ".join(f"U+{ord(c):04X}" for c in dict.fromkeys(word) if not c.isascii())
    return (latin, foreign) if latin.isascii() else None


def suggest_key(
    key: str,
    legal: Iterable[str],
    words: Mapping[str, str] | None = None,
    above: Iterable[str | int] = (),
    roles: Iterable[str] = (),
    written: Sequence[str] = (),
) -> tuple[str, str | None]:
    """(message id, hint) for an unknown key below the keys `above`: R43 if it belongs elsewhere,
    else R42. `words`: other frameworks' names for interface arguments; `written`: where else a key
    of that name is written."""
    names, path = list(legal), [*map(str, above), key]
    near = nearest_name(key, names)
    suggestion = (
        _in_latin_letters(key, names)
        or _without_equal(path, names)
        or _same_key(path, near)
        or _of_other_framework(path, names, words, list(roles))
        or _similar_key(path, near, written)
    )
    return suggestion or ("R42", "valid here: " + ", ".join(names) if names else None)


def _meant(code: str, key: str) -> Suggestion:
    return code, f"did you mean {key}?"


def _in_latin_letters(key: str, names: list[str]) -> Suggestion | None:
    latin = lookalike(key)
    if latin is None:
        return None
    word, foreign = latin
    return "R23", f"it looks like {nearest_name(word, names) or word} but contains {foreign}"


def _without_equal(path: list[str], names: list[str]) -> Suggestion | None:
    """The advice about something that rlcli does not have."""
    advice = absent(path[-1]) or absent(".".join(path[-2:]))
    return ("R42", advice) if advice and path[-1] not in names else None


def _same_key(path: list[str], near: str | None) -> Suggestion | None:
    """The same key in other letters or, if none here is near, elsewhere."""
    if near is not None:
        return _meant("R43", near) if near.lower() == path[-1].lower() else None
    elsewhere = home_of(path[-1], path[:-1])
    return _meant("R43", elsewhere) if elsewhere else None


def _of_other_framework(
    path: list[str], names: list[str], words: Mapping[str, str] | None, roles: list[str]
) -> Suggestion | None:
    key, synonym = path[-1], translated(path, words, roles)
    is_typo = bool(path[1:]) and misspelt(key, names) is not None
    if synonym in (None, ".".join(path)) or is_typo:
        return None
    if synonym.endswith(f".{key}"):
        return _meant("R43", synonym)
    return "R42", called_here(key, synonym)


def _similar_key(path: list[str], near: str | None, written: Sequence[str]) -> Suggestion | None:
    """A similar key here, the same key where it is written, or a similar one elsewhere."""
    if near is not None:
        return _meant("R42", near)
    if written:
        return _meant("R43", written[0])
    if "args" in path:  # nobody looks for a key of the schema among a component's arguments
        return None
    similar = home_of(misspelt(path[-1], homes()) or "", path[:-1])
    return _meant("R42", similar) if similar else None


def home_of(key: str, section: Sequence[str] = ()) -> str | None:
    """The place in the schema where a key is valid that is nearest to a section, whose names it
    has; else the one with the fewest `<role>` and others. None if it is valid nowhere."""

    def shared(home: list[str]) -> int:
        pairs = zip(home[:-1], section, strict=False)
        return len(
            list(takewhile(lambda pair: pair[0] in (pair[1], *PLACEHOLDERS.values()), pairs))
        )

    def nearness(home: list[str]) -> tuple[int, int, int]:
        rest = home[shared(home) :]
        return len(rest) - len(home), len(set(rest) & set(PLACEHOLDERS.values())), len(rest)

    places = [home.split(".") for home in homes().get(key, [])]
    nearest = min(places, key=nearness, default=None)
    return ".".join([*section[: shared(nearest)], *nearest[shared(nearest) :]]) if nearest else None


@cache
def homes() -> dict[str, list[str]]:
    """Key → the places in the schema where it is valid."""
    from rlcli.recipe.schema import Recipe

    homes: dict[str, list[str]] = {}
    _walk(Recipe, (), homes)
    return homes


PLACEHOLDERS = {"models": "<role>", "datasets": "<name>", "graph": "<call>"}


def _walk(model: type[BaseModel], path: tuple[str, ...], homes: dict[str, list[str]]) -> None:
    for name, field in model.model_fields.items():
        homes.setdefault(name, []).append(".".join((*path, name)))
        inner = section_of(field.annotation) or named_section_of(field.annotation)
        if inner is not None:
            many = (PLACEHOLDERS[name],) if name in PLACEHOLDERS else ()
            _walk(inner, (*path, name, *many), homes)
