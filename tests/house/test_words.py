"""Messages are written in plain English: CONTRIBUTING.md has the list of words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sentences import all_sentences

HOME = Path(__file__).parents[2]
FOLDERS = ("rlcli", "interfaces", "backends", "datasets")
QUAINT = re.compile(
    r"\b(goes? on|(?<!there )is no (?!longer)\w+|so many|as often|lies (in|under|beside)|by "
    r"chance|stands before|all well|laid over|beside|has a home|no legal|crowd|told)\b"
)


BANNED = {
    r"as far as (looked|seen|known) (at|here)": "say which were checked",
    r"\bflatters?\b": "overstates",
    r"is not what it was": "has changed since …",
    r"what was made of": "name the result",
    r"\bknows no \w+, which": "does not support",
    r"which is to be \d": "write the setting: (models.actor.mesh.pp=2)",
    r"\bgoes by\b": "uses",
    r"\b(is|are) warned of\b": "rlcli warns about …, or causes a warning",
    r"for want of": "without, or for lack of",
    r"\bput back into the queue\b": "requeued",
    r"in its stead": "instead",
    r"\bnobody knows\b": "is unknown",
    r"\bwho knows?\b": "name it",
    r"lead back to themselves": "circular",
    r"part of the language": "supported",
    r"of which [^ ]+ cannot choose": "does not apply",
    r"\b(rlcli|recipe|it|YAML) wants\b": "needs",
    r"left (to|for) itself": "reserved",
    r"\bcounts? (alike|for more)\b": "has the same, or more, weight",
    r"\b(tokens|values|weights|messages|slices|numbers|results?) travels?\b": "is sent",
    r"\bknows? (nothing|no \w+ism)\b": "does not depend on …, or does not support …",
    r"\bstands? in for\b": "replaces",
    r"\bfor ever\b": "forever",
    r"\b(run|row|model|server|checkpoint)s? of (ours|yours)\b": "rlcli's, your own",
    r"\bits own affair\b": "say what it may do",
    r"\bin every way but\b": "name what is missing",
}
"""Phrases that make a reader stop, and what to write instead."""


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


def test_no_sentence_contains_a_phrase_that_makes_a_reader_stop():
    pattern = re.compile("|".join(f"(?:{phrase})" for phrase in BANNED), re.IGNORECASE)
    sentences = all_sentences()
    problems = [
        f"{sentence}: {match.group()!r} is among BANNED"
        for sentence in sentences
        if (match := pattern.search(sentence.text))
    ]
    assert problems == []
    assert len(sentences) > 5000
