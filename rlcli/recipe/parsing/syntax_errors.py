"""What is wrong with a text that is not YAML: the likely cause and its place, because the parser
says what it expected next, often a line later."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import yaml

from rlcli.recipe.parsing.tree import Mark

Problem = tuple[str, str, Mark, str | None]
"""(message id, message, place, hint)"""
Cause = tuple[str, str, Any]
"""(message, hint, the parser's place)"""

INDENTATION = (
    "wrong indentation",
    "the keys of a section are indented alike, and more than the section itself",
)
SECOND_COLON = (
    "a second colon in one line",
    'quote a text that contains ": "; write a section as {KEY: VALUE}, or its keys on lines below',
)
REFERENCE = (
    "a reference inside {} or [] needs quotes",
    'quote it: "${…}", because { and } are special in YAML',
)
AFTER_THE_END = (
    "text after the end of a value",
    "quote the whole value; an apostrophe within '…' is written ''",
)


def explain_syntax(
    error: yaml.MarkedYAMLError, text: str, mark: Callable[[Any], Mark], open_flows: Sequence[Any]
) -> Problem:
    """The likely cause, else what the parser says. `mark` turns a place of the parser into one of
    the file; `open_flows` are those where braces and brackets were opened."""
    at: Any = error.problem_mark or error.context_mark
    lines = _lines(text, at.line)
    before = lines[at.line][: at.column + 1]
    if re.match(r"[ ]*\t", before):
        tab = mark(_position(at.line, before.index("\t")))
        return "R06", "a tab cannot indent YAML", tab, "use spaces"
    if open_flows and at.line >= text.rstrip().count("\n") + text.endswith("\n"):
        return "R07", "not YAML: this is never closed", mark(open_flows[-1]), None
    cause = _cause_in_flow(at, before) if open_flows else _cause_in_block(error, lines)
    if cause is None:
        return _as_the_parser_says(error, mark)
    message, hint, position = cause
    return "R07", f"not YAML: {message}", mark(position), hint


def _lines(text: str, last: int) -> list[str]:
    """The lines of a text, as the parser counts them, up to the last one that it names, which may
    be beyond the text."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines + [""] * (last + 1 - len(lines))


def _cause_in_flow(at: Any, before: str) -> Cause | None:
    """For the usual mistake within braces and brackets."""
    if not re.search(r"(?<![\"'$])\$\{", before):
        return None
    return *REFERENCE, _position(at.line, before.rindex("${"))


def _cause_in_block(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> Cause | None:
    """For the usual mistakes outside of them."""
    at, start, problem = error.problem_mark, error.context_mark, error.problem or ""
    if at is None:
        return None
    if start is not None and "simple key" in (error.context or ""):
        return _without_colon(lines[start.line][start.column :], start)
    before = lines[at.line][: at.column]
    if "mapping values" in problem:
        is_second = re.search(r":\s", before)
        return (*SECOND_COLON, at) if is_second else _cause_of_place(at.line, lines)
    if start is None or "did not find expected" not in problem or at.column == start.column:
        return None
    return (*AFTER_THE_END, at) if before.strip() else _cause_of_place(at.line, lines)


def _cause_of_place(line: int, lines: Sequence[str]) -> Cause:
    """Why a key cannot begin in this line, where the parser expected none."""
    above = line - 1
    while above > 0 and not re.match(r"\s*[^\s#]", lines[above]):
        above -= 1
    if match := re.match(r"(\s*)([\w.-]+(:|\s+)[\w.-]+)\s*(#|$)", lines[above]):
        return _without_colon(match[2], _position(above, len(match[1])))
    column = len(lines[line]) - len(lines[line].lstrip())
    return *INDENTATION, _position(line, column)


def _without_colon(key: str, position: Any) -> Cause:
    """For a line that should be a key and its value."""
    if match := re.match(r"([\w.-]+):(\S+)", key):
        hint = f"a space follows the colon: {match[1]}: {match[2]}"
        return "no space after the colon", hint, position
    return "a key without a colon", "write KEY: VALUE", position


def _as_the_parser_says(error: yaml.MarkedYAMLError, mark: Callable[[Any], Mark]) -> Problem:
    message = "not YAML: " + re.sub(r"\s+", " ", error.problem or "it cannot be parsed")
    at, context = error.problem_mark or error.context_mark, error.context or ""
    if error.context_mark is not None and re.search(r"flow|quoted|block scalar", context):
        message, at = f"{message} {context}", error.context_mark
    return "R07", message, mark(at), None


def _position(line: int, column: int) -> Any:
    """A place as the parser gives it, both counted from 0."""
    return SimpleNamespace(line=line, column=column)
