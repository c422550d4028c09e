"""Messages are written in plain English: CONTRIBUTING.md has the list of words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
FOLDERS = ("rlcli", "interfaces", "backends", "datasets")
QUAINT = re.compile(
    r"\b(goes? on|(?<!there )is no (?!longer)\w+|so many|as often|lies (in|under|beside)|by "
    r"chance|stands before|all well|laid over|beside|has a home|no legal|crowd|told)\b"
)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The strings of a module except docstrings, with their lines: messages, hints, help."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docs
            and " " in node.value
        ):
            yield node.lineno, node.value


def test_the_pattern_matches_quaint_words_only():
    assert QUAINT.search("the file is no recipe")
    assert not QUAINT.search("it is no longer there, next to the other")


@pytest.mark.parametrize("folder", FOLDERS)
def test_messages_are_plain_english(folder: str):
    problems = [
        f"{path.relative_to(HOME)}:{line}: {match.group()!r} in {text!r}"
        for path in sorted((HOME / folder).rglob("*.py"))
        for line, text in strings(ast.parse(path.read_text(encoding="utf-8")))
        if (match := QUAINT.search(text))
    ]
    assert problems == []
