"""The test files of a project that concern one component, found by reading them, not by importing
them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
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


def helpers_of(
    module: str, components: Set[str], file_of: Callable[[str], Path | None]
) -> frozenset[str]:
    """The modules that a component's `module` imports, directly or through each other, and that
    are none of `components`. `file_of` gives the file of a module; None for one that is not to be
    followed."""
    helpers: set[str] = set()
    unread = {module}
    while unread:
        importing = unread.pop()
        file = file_of(importing)
        if file is None:
            continue
        helpers.add(importing)
        unread |= _imported_by(file.read_bytes(), importing) - helpers - components
    return frozenset(helpers - {module})


def files_about(
    names: Collection[str],
    module: str,
    helpers: Set[str],
    components: Collection[str],
    folders: Iterable[Path],
) -> list[Path]:
    """The test files of these folders that import the component `module` or one of its `helpers`,
    or have one of its `names` as a text, and import no other of `components`: a file about several
    compares them. Files that run `rlcli test` are left out: it would run them, and they it."""
    files = (file for folder in folders for file in sorted(folder.glob("test_*.py")))
    return [
        file for file in files if _is_about(file.read_bytes(), names, module, helpers, components)
    ]


def _is_about(
    source: bytes,
    names: Collection[str],
    module: str,
    helpers: Set[str],
    components: Collection[str],
) -> bool:
    packages = {helper.rpartition(".")[0] for helper in helpers}
    if not any(word.encode() in source for word in (*names, *packages)):
        return False  # parsing all would take a second
    mentions = mentions_of(source)
    if mentions.runs_checks:
        return False
    imported = mentions.modules.intersection(components)
    if imported:
        return imported == {module}
    return not (mentions.texts.isdisjoint(names) and mentions.modules.isdisjoint(helpers))


@functools.cache
def mentions_of(source: bytes) -> Mentions:
    """Of a test file's source."""
    nodes = _nodes_of(source)
    modules = frozenset(module for node in nodes for module in _imports(node, ""))
    texts = frozenset(text for node in nodes if (text := _text(node)) is not None)
    runs_checks = "rlcli.testing.runner" in modules or any(map(_is_command, nodes))
    return Mentions(modules, texts, runs_checks)


def _imported_by(source: bytes, importing: str) -> set[str]:
    """The modules that the source of the module `importing` imports."""
    return {module for node in _nodes_of(source) for module in _imports(node, importing)}


def _nodes_of(source: bytes) -> list[ast.AST]:
    """Of a source text that Python cannot parse, none: who imports it reports that."""
    try:
        return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return []


def _imports(node: ast.AST, importing: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = importing.split(".")[: -node.level] if node.level else []
        module = ".".join([*parents, *([node.module] if node.module else [])])
        yield module
        yield from (f"{module}.{alias.name}" for alias in node.names)


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
