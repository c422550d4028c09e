"""A name says what it holds: words without content are not assigned,
except in a small comprehension.

`vague_names.txt` records how many of them each file still has. A number may only go down, and is
lowered by `python tests/house/test_identifiers.py`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from falling_counts import HOME, lower, python_files, recorded_counts, too_high

RECORD = Path(__file__).with_name("vague_names.txt")
COMPONENTS = ("rlcli", "interfaces", "backends", "datasets")
VAGUE = frozenset(
    [
        *("found", "given", "held", "kept", "known", "made", "said", "wanted"),
        *("part", "place", "thing", "things", "what", "whole"),
        *("less", "more", "one", "other", "own", "there"),
    ]
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SMALL = 25
"""Expressions of a comprehension that one sees at once."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def short_lived(tree: ast.Module) -> set[ast.AST]:
    """The variables of small comprehensions: a reader sees all of their use at once."""
    return {
        node
        for comprehension in ast.walk(tree)
        if isinstance(comprehension, COMPREHENSIONS) and size(comprehension) <= SMALL
        for loop in comprehension.generators
        for node in ast.walk(loop.target)
    }


def size(tree: ast.AST) -> int:
    """The number of expressions in a part of the syntax tree."""
    return sum(isinstance(node, ast.expr) for node in ast.walk(tree))


def assigned_name(node: ast.AST) -> str | None:
    """The name that a node of the syntax tree binds."""
    match node:
        case ast.arg(arg=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name
        case ast.alias(asname=name):
            return name
    return node.name if isinstance(node, DEFINITIONS) else None


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each name without content."""
    named = [node for node in ast.walk(tree) if assigned_name(node) in VAGUE]
    excepted = short_lived(tree) if named else set()
    for node in named:
        if node not in excepted:
            yield node.lineno, assigned_name(node)


@cache
def todays_names() -> dict[str, list[tuple[int, str]]]:
    """The names without content of each file that has some, in the order of its lines."""
    names = {
        file.relative_to(HOME).as_posix(): sorted(
            vague_names(ast.parse(file.read_text(encoding="utf-8")))
        )
        for file in python_files()
    }
    return {file: lines for file, lines in names.items() if lines}


def todays_counts() -> dict[str, int]:
    return {file: len(names) for file, names in todays_names().items()}


def test_no_file_gains_a_name_without_content():
    recorded = recorded_counts(RECORD)
    problems = [
        f"{file}:{line}: `{name}` does not say what it holds"
        for file, names in todays_names().items()
        if len(names) > recorded.get(file, 0)
        for line, name in names
    ]
    assert not problems, "\n".join(["a file may not gain such a name:", *problems])


def test_the_record_is_lowered_with_the_names():
    command = "lower the record: python tests/house/test_identifiers.py"
    problems = too_high(RECORD, todays_counts())
    assert not problems, "\n".join([command, *problems])


def test_every_kind_of_assignment_is_checked():
    source = """
def one(found, *what, **given): ...
class own: ...
made: int = 1
self.place = 1
for known, (part, *more) in pairs: ...
with folder as held: ...
if (whole := 1): ...
sorted(pairs, key=lambda less: less)
import json as thing, ast as things
try: ...
except OSError as said: ...
match 1:
    case {"key": wanted}: ...
    case [*there]: ...
    case int() as kept: ...
pairs = [
    other.first + other.second + other.third + other.fourth
    for other in pairs
    if other.is_first and other.is_second or other.is_third and other.is_fourth
    if other.fifth and other.sixth
]
"""
    assert {name for _, name in vague_names(ast.parse(source))} == VAGUE


def test_names_that_are_read_or_live_for_a_small_comprehension_are_allowed():
    source = """
print(one, self.found, call(what=1))
pairs = [(one, other) for one in pairs for other in one]
"""
    assert list(vague_names(ast.parse(source))) == []


def test_no_two_classes_share_a_name():
    homes: dict[str, list[str]] = defaultdict(list)
    for folder in COMPONENTS:
        for file in sorted((HOME / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(str(file.relative_to(HOME)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


if __name__ == "__main__":
    lower(RECORD, todays_counts())
