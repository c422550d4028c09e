"""Code that one can read: functions and statements have limits, in expressions and not in lines.

A function has at most LARGEST expressions. A statement has at most one comprehension or
conditional expression, unless it is small. `large_parts.txt` records by file how many functions and
statements are still above; a number may only go down, and is lowered by
`python tests/house/test_shape.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from falling_counts import HOME, lower, python_files, recorded_counts, too_high

RECORD = Path(__file__).with_name("large_parts.txt")
LARGEST = 120
"""Expressions of a function."""
SMALL = 20
"""Expressions of a statement that may have several comprehensions."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONDENSED = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)


def size(tree: ast.AST) -> int:
    """The number of expressions in a part of the syntax tree."""
    return sum(isinstance(node, ast.expr) for node in ast.walk(tree))


def of_statement(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement without those of the statements in it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr | ast.withitem):
            yield from ast.walk(child)


def large_parts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of each function and statement above its limit."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            count = sum(map(size, node.body))
            if count > LARGEST:
                yield node.lineno, f"`{node.name}` has {count} expressions, more than {LARGEST}"
        elif isinstance(node, ast.stmt) and not isinstance(node, ast.ClassDef):
            expressions = list(of_statement(node))
            condensed = sum(isinstance(expression, CONDENSED) for expression in expressions)
            if condensed > 1 and sum(isinstance(part, ast.expr) for part in expressions) > SMALL:
                yield node.lineno, f"a statement has {condensed} comprehensions or conditions"


@cache
def todays_parts() -> dict[str, list[tuple[int, str]]]:
    """What is above the limits in each file, in the order of its lines."""
    parts = {
        file.relative_to(HOME).as_posix(): sorted(
            large_parts(ast.parse(file.read_text(encoding="utf-8")))
        )
        for file in python_files()
    }
    return {file: lines for file, lines in parts.items() if lines}


def todays_counts() -> dict[str, int]:
    return {file: len(lines) for file, lines in todays_parts().items()}


def test_no_file_gains_a_large_function_or_statement():
    recorded = recorded_counts(RECORD)
    problems = [
        f"{file}:{line}: {problem}"
        for file, parts in todays_parts().items()
        if len(parts) > recorded.get(file, 0)
        for line, problem in parts
    ]
    assert not problems, "\n".join(["divide them, or name their parts:", *problems])


def test_the_record_is_lowered_with_the_parts():
    command = "lower the record: python tests/house/test_shape.py"
    problems = too_high(RECORD, todays_counts())
    assert not problems, "\n".join([command, *problems])


def test_large_functions_and_condensed_statements_are_found():
    source = f"""
async def large():
    return [{", ".join(["x"] * LARGEST)}]
def condensed():
    return [a for a in b if c(a)], [a for a in b if c(a)], {", ".join(["x"] * SMALL)}
if x if x else [x for x in [{", ".join(["x"] * SMALL)}]]: pass
"""
    assert [line for line, _ in sorted(large_parts(ast.parse(source)))] == [2, 5, 6]


def test_small_ones_and_long_plain_ones_are_allowed():
    source = f"""
def outer():
    pair = [a for a in b], [a for a in b]
    table = [{", ".join(["x"] * 90)}, [a for a in b]]
    for a in [b for b in c]:
        return d if e else f
"""
    assert list(large_parts(ast.parse(source))) == []


if __name__ == "__main__":
    lower(RECORD, todays_counts())
