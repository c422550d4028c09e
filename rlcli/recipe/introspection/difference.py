"""Differences between two recipes, value by value, with the place where each was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from rlcli.recipe.introspection.fields import completed
from rlcli.recipe.parsing.tree import DEFAULT, KeyPath, dotted, is_default, plain_leaves
from rlcli.recipe.resolve import Resolved

Kind = Literal["changed", "added", "removed"]


@dataclass(frozen=True)
class Values:
    """A recipe as plain values for every key, including the defaults of all arguments."""

    of: Mapping[KeyPath, Any]
    origins: Mapping[str, str]
    """Key → `file:line:col`; keys that no layer sets are missing."""

    def origin(self, path: KeyPath) -> str | None:
        """Where a value was written; None for a key that the recipe does not have."""
        return self.origins.get(dotted(path), DEFAULT) if path in self.of else None


@dataclass(frozen=True)
class Difference:
    """A key that differs between the two."""

    key: str
    kind: Kind
    before: Any
    """None if it was added."""
    now: Any
    """None if it was removed."""
    origin_before: str | None
    origin_now: str | None


@dataclass(frozen=True)
class DifferenceGroup:
    """The same difference at several keys, such as a value that one `${ppo}` passes to four
    calls."""

    pattern: str
    """The key, with `*` for the parts that vary."""
    differences: tuple[Difference, ...]


def values_of(recipe: Mapping[str, Any], origins: Mapping[str, str]) -> Values:
    """The values of a resolved recipe. Defaults of arguments are the components' current ones."""
    return Values(dict(plain_leaves(completed(dict(recipe)))), origins)


def values_of_resolved(resolved: Resolved) -> Values:
    return values_of(resolved.to_json(), resolved.origins)


def differences(before: Values, now: Values) -> list[Difference]:
    """Every key whose value differs, in the order of the recipes' keys."""
    result = []
    for path in dict.fromkeys([*before.of, *now.of]):
        old, new = before.of.get(path), now.of.get(path)
        is_old, is_new = path in before.of, path in now.of
        if is_old and is_new and _same(old, new):
            continue
        kind: Kind = "changed" if is_old and is_new else "removed" if is_old else "added"
        result.append(
            Difference(dotted(path), kind, old, new, before.origin(path), now.origin(path))
        )
    return result


def _same(left: Any, right: Any) -> bool:
    """Equal, and of the same type: `1` and `true` differ."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(
            _same(a, b) for a, b in zip(left, right, strict=True)
        )
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def grouped(differences: Sequence[Difference]) -> list[DifferenceGroup]:
    """Group differences with the same last key, values and origins, in the order of their first."""
    groups: dict[str, list[Difference]] = {}
    for difference in differences:
        last = difference.key.rpartition(".")[2]
        chosen = any(
            is_default(origin or "") for origin in (difference.origin_before, difference.origin_now)
        )
        depth = difference.key.count(".") if chosen else 0
        values = (difference.before, difference.now)
        origins = (difference.origin_before, difference.origin_now)
        identity = repr((difference.kind, last, depth, values, origins))
        groups.setdefault(identity, []).append(difference)
    return [
        DifferenceGroup(_pattern([member.key for member in group]), tuple(group))
        for group in groups.values()
    ]


def _pattern(keys: Sequence[str]) -> str:
    """`graph.*.interface.args.kl_ctl`; parts outside the common prefix and suffix become one
    `*`."""
    if len(keys) == 1:
        return keys[0]
    parts = [key.split(".") for key in keys]
    if len({len(names) for names in parts}) == 1:
        columns = zip(*parts, strict=True)
        return ".".join(names[0] if len(set(names)) == 1 else "*" for names in columns)
    from_the_end = zip(*(names[::-1] for names in parts), strict=False)
    shared = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, from_the_end)]
    return ".".join(["*", *reversed(shared)])


def sections_of_one(compared: Sequence[Difference], before: Values, now: Values) -> dict[str, str]:
    """Key → the topmost section that contains it and that only one of the recipes has:
    `models.critic`."""
    result = {}
    for kind, here, elsewhere in (("removed", before, now), ("added", now, before)):
        set_there = [path for path, value in elsewhere.of.items() if value is not None]
        theirs = {path[:depth] for path in set_there for depth in range(1, len(path) + 1)}
        paths = {dotted(path): path for path in here.of}
        for difference in (entry for entry in compared if entry.kind == kind):
            path = paths[difference.key]
            top = next((path[:n] for n in range(1, len(path)) if path[:n] not in theirs), None)
            if top is not None:
                result[difference.key] = dotted(top)
    return result


def implied(difference: Difference) -> bool:
    """Whether a key came or went with its component or section,
    without having been set explicitly."""
    origin = difference.origin_now if difference.kind == "added" else difference.origin_before
    return difference.kind != "changed" and is_default(origin or "")
