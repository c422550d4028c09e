"""An interface's declarations of the keys of its calls, in literals that are read without importing
it.

An entry is a key, alone or with a condition:

    packed_input_ids                    always
    prompt_mask if given                if the call receives it
    packed_ref_logprobs if kl_ctl       if the argument is set: not null, false or 0
    values unless disable_value         if the argument is not set
    prompt_mask if text=response        if the argument has this value
    routed_experts if a.b               the same of an entry of an argument: a mapping, or settings
    each of weights                     every key that the argument, a mapping or a list, names
    above best                          for numbers: one more than the argument, if set

A key may have several entries; any of them can make it needed. A class replaces the entries of its
base, or adds to them if its own begin with `...`:

    READS: ClassVar[Declaration] = {"inference": (..., "values unless disable_value")}
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

Declaration = Mapping[str, tuple[str | EllipsisType, ...]]
"""Method → its entries. Nothing is declared for a method that is not named."""

_ENTRY = re.compile(
    r"(?P<form>each of |above )?(?P<key>\w+)"
    r"(?: (?P<when>if|unless) (?P<argument>[\w.]+)(?:=(?P<value>\S+))?)?"
)
_WEAKEST_FIRST = (False, None, True)
"""Whether an entry needs its key: no, only if the key is given, yes. Of several, the strongest
counts."""


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
    up_to: Mapping[str, str] = field(default_factory=dict)
    """Optional key → the argument that could make it needed."""

    @property
    def all(self) -> tuple[str, ...]:
        return self.needed + self.optional


def declared_keys(entries: Iterable[str], argument: Callable[[str], Any]) -> DeclaredKeys:
    """The keys of some entries. `argument(name)` returns an argument's value, or raises LookupError
    if it is unknown: then the entry counts as `if given`.

    Raises ValueError for an entry that cannot be parsed.
    """
    needs: dict[str, bool | None] = {}
    due_to: dict[str, str] = {}
    up_to: dict[str, str] = {}
    for entry in map(_parsed, entries):
        counts = _counts(entry, argument)
        due = entry["key"] if entry["form"] else entry["argument"]
        for key in _named(entry, argument):
            needs[key] = max(needs.get(key, False), counts, key=_WEAKEST_FIRST.index)
            if due and counts is not None:
                (due_to if counts else up_to).setdefault(key, due)
    needed = tuple(key for key, counts in needs.items() if counts)
    optional = tuple(key for key, counts in needs.items() if not counts)
    if_given = tuple(key for key, counts in needs.items() if counts is None)
    for key in needed:
        up_to.pop(key, None)
    return DeclaredKeys(needed, optional, due_to, if_given, up_to)


def largest_number(declared: DeclaredKeys | None) -> int:
    """The largest of the needed entries, where these are numbers; 1 if there are none."""
    entries = declared.needed if declared is not None else ()
    return max((int(entry) for entry in entries if entry.isdecimal()), default=1)


def _parsed(entry: str) -> re.Match[str]:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(
            f"{entry!r} is not a valid key, `KEY if ARGUMENT`, `KEY unless ARGUMENT`, "
            "`KEY if given`, `each of ARGUMENT` or `above ARGUMENT`"
        )
    return match


def _named(entry: re.Match[str], argument: Callable[[str], Any]) -> list[str]:
    """The keys of an entry. Of an entry that an argument names, none if the argument is unknown, or
    of another kind, which is reported elsewhere."""
    if entry["form"] is None:
        return [entry["key"]]
    try:
        value = argument(entry["key"])
    except LookupError:
        return []
    if entry["form"] == "above ":
        return [str(value + 1)] if isinstance(value, int) else []
    names = value if isinstance(value, Mapping | list | tuple) else ()
    return [key for key in names if isinstance(key, str)]


def _counts(entry: re.Match[str], argument: Callable[[str], Any]) -> bool | None:
    """Whether an entry applies; None: if the key is given."""
    if entry["when"] is None:
        return True
    if entry["argument"] == "given":
        return None
    name, *inner = entry["argument"].split(".")
    try:
        value = argument(name)
    except LookupError:
        return None
    for entry_name in inner:
        value = value.get(entry_name) if isinstance(value, Mapping) else getattr(value, entry_name)
    holds = str(value) == entry["value"] if entry["value"] is not None else bool(value)
    return holds == (entry["when"] == "if")


def inherited(declarations: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A class's declaration, merged from those of its bases (most distant first): for each name the
    nearest wins; a tuple that begins with `...` adds to the inherited one."""
    return functools.reduce(_over, declarations, {})


def _over(base: Mapping[str, Any], declaration: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, entries in declaration.items():
        adds = isinstance(entries, tuple) and entries[:1] == (...,)
        merged[name] = (*base.get(name, ()), *entries[1:]) if adds else entries
    return merged
