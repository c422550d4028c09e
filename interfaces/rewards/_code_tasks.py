"""Extracts programs from responses and tests from rows, and decides which tests pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from rlcli.errors import DataError

from ._code_statements import executes

Part = Literal["last_block", "first_block", "whole"]
Task = dict[str, Any]

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
FORMS = '{"input": "…", "output": "…"} or code such as "assert add(2, 3) == 5"'
EXECUTED = (
    'write statements such as "assert add(2, 3) == 5", or call the functions that contain them; '
    "check(candidate) is called in rows with an entry_point, and what comes after "
    'if __name__ == "__main__" is not executed'
)


def program_of(response: str, selection: Part) -> str | None:
    """The program in a response, or None."""
    if selection == "whole":
        return response
    blocks = _likeliest_blocks(response)
    return blocks[-1 if selection == "last_block" else 0] if blocks else None


def _likeliest_blocks(response: str) -> list[str]:
    """The blocks that are said to be Python; if none is, those without a language, else all: next
    to a program there often is what it prints, or a command that runs it."""
    blocks = [(_language(match[0]), match[1]) for match in _BLOCK.finditer(response)]
    python = [text for language, text in blocks if language.startswith("py")]
    return python or [text for language, text in blocks if not language] or [t for _, t in blocks]


def _language(block: str) -> str:
    """What follows the opening ```, in small letters."""
    return block.partition("\n")[0].strip().lstrip("`").strip().lower()


def tasks_of(row: Mapping[str, Any], key: str, sample: str) -> list[Task]:
    """The tasks for a program of this row: one for each input, and one for all test code.
    Raises DataError."""
    tests = row.get(key)
    if not tests:
        raise DataError(
            f"{sample} has no {key}", hint=f"code_reward needs a list of {FORMS}", code="F31"
        )
    tests = tests if isinstance(tests, list) else [tests]
    for number, test in enumerate(tests, start=1):
        if not _is_test(test):
            message = f"entry {number} of the {key} of {sample} is {test!r:.80}"
            raise DataError(message, hint=f"it must be {FORMS}", code="F31")
    return [
        {"stdin": test["input"], "expected": test["output"]}
        for test in tests
        if not isinstance(test, str)
    ] + _code_of(row, tests, f"the {key} of {sample}")


def _code_of(row: Mapping[str, Any], tests: list[Any], source: str) -> list[Task]:
    """The task of all test code, if there is any."""
    code = [test for test in tests if isinstance(test, str)]
    entry_point = row.get("entry_point")
    if code and not any(executes(test, entry_point is not None) for test in code):
        message = f"the code in {source} executes nothing: every program would pass"
        raise DataError(message, hint=EXECUTED, code="F31")
    return [{"tests": code, "entry_point": entry_point}] if code else []


def passed(task: Task, reply: Mapping[str, Any]) -> list[bool]:
    """For each test of a task, whether it passed, according to a worker's reply."""
    if "stdin" in task:
        return [reply["status"] == 0 and _lines(reply["output"]) == _lines(task["expected"])]
    marks = reply["passed"]
    return [number < len(marks) and marks[number] is True for number in range(len(task["tests"]))]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _is_test(test: Any) -> bool:
    if isinstance(test, str):
        return bool(test.strip())
    return isinstance(test, dict) and all(
        isinstance(test.get(name), str) for name in ("input", "output")
    )
