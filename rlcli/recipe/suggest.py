"""Suggestions for a wrong name: the nearest one, the same one elsewhere,
or another framework's word."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from pydantic import BaseModel

from rlcli.recipe.annotations import named_section_of, section_of
from rlcli.recipe.synonyms import absent, called_here, translated
from rlcli.spelling import misspelt, nearest_name

LOOKALIKES = dict(
    zip("аеорсухіјѕԁӏһԛԝьΑΒΕΖΗΙΚΜΝΟΡΤΥΧοαι", "aeopcyxijsdlhqwbABEZHIKMNOPTYXoai", strict=True)
)
"""Cyrillic and Greek letters that look like Latin ones."""


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
        target = nearest_name(latin[0], names) or latin[0]
        return "R23", f"it looks like {target} but contains {latin[1]}"
    if (advice := absent(key) or absent(".".join(foreign[-2:]))) and key not in names:
        return "R42", advice
    near = nearest_name(key, names)
    if near is not None and near.lower() == key.lower():
        return "R43", f"did you mean {near}?"
    elsewhere = homes().get(key)
    if elsewhere and near is None:
        return "R43", f"did you mean {elsewhere[0]}?"
    synonym = translated(foreign, words, list(roles))
    is_typo = bool(foreign[1:]) and misspelt(key, names) is not None
    if synonym not in (None, ".".join(foreign)) and not is_typo:
        if synonym.endswith(f".{key}"):
            return "R43", f"did you mean {synonym}?"
        return "R42", called_here(key, synonym)
    similar = homes().get(misspelt(key, homes()) or "", [])
    if "args" in foreign:  # nobody looks for a key of the schema among a component's arguments
        similar = []
    for code, targets in (("R42", [near]), ("R43", written), ("R42", similar)):
        if targets and targets[0] is not None:
            return code, f"did you mean {targets[0]}?"
    return "R42", "valid here: " + ", ".join(names) if names else None


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
