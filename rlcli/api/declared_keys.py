"""An interface's declarations of the keys of its calls, in literals that are read without importing
it.

An entry is a key, alone or with a condition:

    packed_input_ids                    always
    prompt_mask if given                if the call receives it
    packed_ref_logprobs if kl_ctl       if the argument is set: not null, false or 0
    values unless disable_value         if the argument is not set
    prompt_mask if text=response        if the argument has this value
    each of weights                     every key that the argument, a mapping or a list, names

A key may have several entries; any of them can make it needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Declaration = Mapping[str, tuple[str, ...]]
"""Method → its entries. Nothing is declared for a method that is not named."""

_ENTRY = re.compile(r"(?P<key>\w+)(?: (?P<when>if|unless) (?P<argument>\w+)(?:=(?P<value>\S+))?)?")
_EACH = re.compile(r"each of (?P<argument>\w+)")


@dataclass(frozen=True)
class DeclaredKeys:
    """The keys of one call of an interface, given the interface's arguments."""

    needed: tuple[str, ...]
    """Read, or written, whatever else the call receives."""
    optional: tuple[str, ...]
    """Read, or written, only sometimes or with other arguments."""
    due_to: Mapping[str, str] = field(default_factory=dict)
    """Key → the argument that makes it needed."""
    if_given: tuple[str, ...] = ()
    """The optional ones that are used whenever they are present, or for which this is unknown."""

    @property
    def all(self) -> tuple[str, ...]:
        return self.needed + self.optional


def declared_keys(entries: Iterable[str], argument: Callable[[str], Any]) -> DeclaredKeys:
    """The keys of some entries. `argument(name)` returns an argument's value, or raises LookupError
    if it is unknown: then the entry counts as `if given`.

    Raises ValueError for an entry that cannot be parsed.
    """
    needed: dict[str, bool | None] = {}
    due_to: dict[str, str] = {}
    for entry in entries:
        if each := _EACH.fullmatch(entry):
            named = _named(each["argument"], argument)
            needed |= dict.fromkeys(named, True)
            due_to |= dict.fromkeys(named, each["argument"])
            continue
        match = _ENTRY.fullmatch(entry)
        if match is None:
            kinds = "`KEY if ARGUMENT`, `KEY unless ARGUMENT`, `KEY if given` or `each of ARGUMENT`"
            raise ValueError(f"{entry!r} is not a valid key, {kinds}")
        counts = _counts(match, argument)
        earlier = needed.get(match["key"], False)
        needed[match["key"]] = (
            True if True in (earlier, counts) else None if None in (earlier, counts) else False
        )
        if counts and match["argument"]:
            due_to.setdefault(match["key"], match["argument"])
    return DeclaredKeys(
        tuple(key for key, counts in needed.items() if counts),
        tuple(key for key, counts in needed.items() if not counts),
        due_to,
        tuple(key for key, counts in needed.items() if counts is None),
    )


def largest_number(declared: DeclaredKeys | None, default: int) -> int:
    """The largest of the needed entries, where these are numbers."""
    entries = declared.needed if declared is not None else ()
    return max((int(entry) for entry in entries if entry.isdecimal()), default=default)


def _named(name: str, argument: Callable[[str], Any]) -> list[str]:
    """The keys that an argument names; none if it is unknown, or of another kind,
    which is reported elsewhere."""
    try:
        value = argument(name)
    except LookupError:
        return []
    return (
        [key for key in value if isinstance(key, str)]
        if isinstance(value, Mapping | list | tuple)
        else []
    )


def _counts(entry: re.Match[str], argument: Callable[[str], Any]) -> bool | None:
    """Whether an entry applies; None: if the key is given."""
    if entry["when"] is None:
        return True
    if entry["argument"] == "given":
        return None
    try:
        value = argument(entry["argument"])
    except LookupError:
        return None
    holds = str(value) == entry["value"] if entry["value"] is not None else bool(value)
    return holds == (entry["when"] == "if")


def inherited(declarations: Sequence[Declaration]) -> dict[str, tuple[str, ...]]:
    """A class's declarations, merged from those of its bases (most distant first): for each method
    the nearest wins."""
    return {
        method: entries for declaration in declarations for method, entries in declaration.items()
    }
