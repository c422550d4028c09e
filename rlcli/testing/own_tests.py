"""The test files of a project that concern one component, found by reading them, not by importing
them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

WORDS_OF_COMMAND = ("rlcli", "test")


@dataclass(frozen=True)
class Mentions:
    """The names in a test file."""

    modules: frozenset[str]
    """Modules that it imports; `from a import b` counts as `a` and `a.b`."""
    texts: frozenset[str]
    """Its string constants."""
    runs_checks: bool
    """Whether it runs `rlcli test` itself."""


def files_about(
    names: Collection[str], module: str, components: Collection[str], folders: Iterable[Path]
) -> list[Path]:
    """The test files of these folders that import the component `module`, or have one of its
    `names` as a text, and import no other of `components`: a file about several compares them.
    Files that run `rlcli test` are left out: it would run them, and they it."""
    files = (file for folder in folders for file in sorted(folder.glob("test_*.py")))
    return [file for file in files if _is_about(file.read_bytes(), names, module, components)]


def _is_about(
    source: bytes, names: Collection[str], module: str, components: Collection[str]
) -> bool:
    if not any(name.encode() in source for name in names):
        return False  # parsing all would take a second
    mentions = mentions_of(source)
    if mentions.runs_checks:
        return False
    imported = mentions.modules.intersection(components)
    return imported == {module} or (not imported and not mentions.texts.isdisjoint(names))


@functools.cache
def mentions_of(source: bytes) -> Mentions:
    """Of a source text that Python cannot parse, nothing: who imports it reports that."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        nodes = []
    modules = frozenset(module for node in nodes for module in _imports(node))
    texts = frozenset(text for node in nodes if (text := _text(node)) is not None)
    runs_checks = "rlcli.testing.runner" in modules or any(map(_is_command, nodes))
    return Mentions(modules, texts, runs_checks)


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_command(node: ast.AST) -> bool:
    """Whether it is `rlcli test …`: a text, a list of words, or a call of what is named `rlcli`."""
    return WORDS_OF_COMMAND in pairwise(_words(node))


def _words(node: ast.AST) -> Sequence[str | None]:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
        return [name, *map(_text, node.args)]
    if isinstance(node, ast.List | ast.Tuple):
        return [_text(element) for element in node.elts]
    return (_text(node) or "").split()[:2]
