"""Inequalities of a variable with its bounds, and the intervals that they are."""

from __future__ import annotations

import re

from .words import GREEK

_AS_BELOW = {">": "<", r"\gt": "<", r"\ge": r"\le", r"\geq": r"\le"}
_BRACKETS = {"<": "()", r"\lt": "()", r"\le": "[]", r"\leq": "[]"}
"""A relation to bounds above → the brackets of the interval."""
_RELATION = re.compile(r"(<|>|=|\\(?:l[et]q?|g[et]q?|neq?|in|notin)(?![A-Za-z]))")
_VARIABLE = re.compile(rf"[A-Za-z]|\\(?:{'|'.join(sorted(GREEK))})")
_INTERVAL = re.compile(
    r"\[[^][()]+,[^][()]+[])] | \([^][()]+,[^][()]+\] | \(\s*-\s*\\infty\s*,[^][()]+\)"
    r"| \([^][()]+,\s*\\infty\s*\)",
    re.VERBOSE,
)


def is_interval(latex: str) -> bool:
    """Whether it can be nothing else, as (1,2) can: it includes a bound or has an infinite one."""
    return _INTERVAL.fullmatch(latex) is not None


def upwards(latex: str) -> str:
    """`3>x>1` as `1<x<3`, which math-verify reads."""
    parts = _RELATION.split(latex)
    if len(parts) != 5 or not _AS_BELOW.keys() >= {parts[1], parts[3]}:
        return latex
    return "".join(_AS_BELOW.get(part, part) for part in reversed(parts))


def as_interval(latex: str) -> str:
    """`1 \\le x < 2` as `[1,2)` and `x > 3` as `(3,\\infty)`; others as they are."""
    parts = [part.strip() for part in _RELATION.split(upwards(latex))]
    if len(parts) == 3:
        parts = _with_infinite_bound(*parts)
    if len(parts) != 5 or not _BRACKETS.keys() >= {parts[1], parts[3]}:
        return latex
    low, first, name, second, high = parts
    is_bounded = _VARIABLE.fullmatch(name) and name not in _VARIABLE.findall(low + high)
    return f"{_BRACKETS[first][0]}{low},{high}{_BRACKETS[second][1]}" if is_bounded else latex


def _with_infinite_bound(left: str, relation: str, right: str) -> list[str]:
    """`x > 3` as the parts of `3 < x < \\infty`."""
    if relation in _AS_BELOW:
        left, relation, right = right, _AS_BELOW[relation], left
    if _VARIABLE.fullmatch(left):
        return [r"-\infty", "<", left, relation, right]
    return [left, relation, right, "<", r"\infty"]
