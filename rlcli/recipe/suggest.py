"""Suggestions for a wrong name: the nearest one, the same one elsewhere,
or another framework's word."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from pydantic import BaseModel

from rlcli.recipe.annotations import named_section_of, section_of
from rlcli.recipe.synonyms import called_here, translated

LOOKALIKES = dict(
    zip("аеорсухіјѕԁӏһԛԝьΑΒΕΖΗΙΚΜΝΟΡΤΥΧοαι", "aeopcyxijsdlhqwbABEZHIKMNOPTYXoai", strict=True)
)
"""Cyrillic and Greek letters that look like Latin ones."""

A_SLIP = 0.85
"""Words at least this similar count as a typo of each other,
even if the word has a meaning elsewhere."""


def close_to(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The nearest name, or None if none is near. `cutoff`: required similarity, from 0 to 1."""
    candidates = list(names)
    folded = {name.lower().replace("-", "_"): name for name in candidates}
    same = folded.get(word.lower().replace("-", "_"))
    if same is not None:
        return same
    near = difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(word: str, names: Iterable[str], otherwise: str | None = None) -> str | None:
    """The hint for a wrong name: the nearest one, or something else if none is near."""
    near = close_to(word, names)
    return f"did you mean {near}?" if near else otherwise


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
    names, foreign = list(legal), [*map(str, above), key]
    if (latin := lookalike(key)) is not None:
        target = close_to(latin[0], names) or latin[0]
        return "R23", f"it looks like {target} but contains {latin[1]}"
    near = close_to(key, names)
    if near is not None and near.lower() == key.lower():
        return "R43", f"did you mean {near}?"
    elsewhere = _homes().get(key)
    if elsewhere and near is None:
        return "R43", f"did you mean {elsewhere[0]}?"
    synonym = translated(foreign, words, list(roles))
    if synonym is not None and close_to(key, names, cutoff=A_SLIP) is None:
        return "R42", called_here(key, synonym)
    if near is not None:
        return "R42", f"did you mean {near}?"
    if written:
        return "R43", f"did you mean {written[0]}?"
    if close_home := close_to(key, _homes(), cutoff=A_SLIP):
        return "R42", f"did you mean {_homes()[close_home][0]}?"
    return "R42", "legal here: " + ", ".join(names) if names else None


@cache
def _homes() -> dict[str, list[str]]:
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
