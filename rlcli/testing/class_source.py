"""What the source of a class says, as far as it can be read."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from rlcli.api.limits import check_arguments

API = "rlcli.api."
"""Modules whose classes have no arguments of their own."""


def attributes_read(cls: type) -> set[str] | None:
    """The names of attributes that the methods of a class read, other than to check them; None if
    one of these hands the component on as a whole."""
    bases = [base for base in cls.__mro__ if not base.__module__.startswith(API)]
    nodes = [node for base in bases for node in _used_nodes(source_of(base))]
    if sum(map(_is_self, nodes)) > sum(map(_asks_self, nodes)):
        return None
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def source_of(code: Any) -> ast.AST:
    """A class or module as it is written; empty if that is unknown."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _used_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What it consists of, without conditions under which it does nothing but raise, and without
    the check of LIMITS."""
    if isinstance(tree, ast.If) and all(isinstance(line, ast.Raise) for line in tree.body):
        return
    if isinstance(tree, ast.Call) and getattr(tree.func, "id", "") == check_arguments.__name__:
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _used_nodes(child)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _asks_self(node: ast.AST) -> bool:
    """Whether it is an attribute of the component, or its type."""
    if isinstance(node, ast.Attribute):
        return _is_self(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "type" and any(map(_is_self, node.args))
    return False
