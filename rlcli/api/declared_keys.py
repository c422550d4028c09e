"""What an interface declares of the keys of its calls, in literals that are read without importing it.

An entry is a key, or a key and when it counts:

    packed_input_ids                    always
    prompt_mask if given                used where the call receives it
    packed_ref_logprobs if kl_ctl       with an argument that is set: not null, false or 0
    values unless disable_value         without it
    prompt_mask if text=response        with an argument that has this value
    each of weights                     every key that an argument, a mapping or a list, names

A key may have several entries; each of them can make it needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Declaration = Mapping[str, tuple[str, ...]]
"""Method → its entries. A method that is not named has declared nothing."""

_ENTRY = re.compile(r"(?P<key>\w+)(?: (?P<when>if|unless) (?P<argument>\w+)(?:=(?P<value>\S+))?)?")
_EACH = re.compile(r"each of (?P<argument>\w+)")


@dataclass(frozen=True)
class DeclaredKeys:
    """The keys of one call of an interface, with the arguments that it has."""

    needed: tuple[str, ...]
    """Read, or written, whatever else the call receives."""
    optional: tuple[str, ...]
    """Read, or written, now and then; or with other arguments."""
    due_to: Mapping[str, str] = field(default_factory=dict)
    """Key → the argument that makes it needed."""
    if_given: tuple[str, ...] = ()
    """Of the optional ones, those that are used wherever they are there, or where nobody can say."""

    @property
    def all(self) -> tuple[str, ...]:
        return self.needed + self.optional


def declared_keys(entries: Iterable[str], argument: Callable[[str], Any]) -> DeclaredKeys:
    """The keys of some entries. `argument(name)` is the value of an argument, a LookupError where that is not known:
    then the entry counts as `if given`.

    Raises ValueError for an entry that cannot be read.
    """
    needed: dict[str, bool | None] = {}
    due_to: dict[str, str] = {}
    for entry in entries:
        if each := _EACH.fullmatch(entry):
            named = _named(each["argument"], argument)
            needed |= dict.fromkeys(named, True)
            due_to |= dict.fromkeys(named, each["argument"])
            continue
        found = _ENTRY.fullmatch(entry)
        if found is None:
            kinds = "`KEY if ARGUMENT`, `KEY unless ARGUMENT`, `KEY if given` or `each of ARGUMENT`"
            raise ValueError(f"{entry!r} is not a valid key, {kinds}")
        counts = _counts(found, argument)
        known = needed.get(found["key"], False)
        needed[found["key"]] = True if True in (known, counts) else None if None in (known, counts) else False
        if counts and found["argument"]:
            due_to.setdefault(found["key"], found["argument"])
    return DeclaredKeys(
        tuple(key for key, counts in needed.items() if counts),
        tuple(key for key, counts in needed.items() if not counts),
        due_to,
        tuple(key for key, counts in needed.items() if counts is None),
    )


def _named(name: str, argument: Callable[[str], Any]) -> list[str]:
    """The keys that an argument names; none where it is not known, or of another kind, which is reported elsewhere."""
    try:
        value = argument(name)
    except LookupError:
        return []
    return [key for key in value if isinstance(key, str)] if isinstance(value, Mapping | list | tuple) else []


def _counts(entry: re.Match[str], argument: Callable[[str], Any]) -> bool | None:
    """None: if the key is given."""
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
    """What a class declares, from that of its bases, the most distant first: the nearest speaks for each method."""
    return {method: entries for declaration in declarations for method, entries in declaration.items()}
