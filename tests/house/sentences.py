"""All sentences that people read, on one page, with the file and line of each.

    python tests/house/sentences.py > sentences.txt

Messages, hints and help of the source, descriptions of settings and rooms, documents, and comments
of recipes. The page is read from top to bottom, as someone who does not know the source would.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).parents[2]
SOURCES = ("rlcli", "interfaces", "backends", "datasets")
DOCUMENTS = ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
TEXTS = ("rlcli/cli/codes.txt",)


class Sentence(NamedTuple):
    """A text that people read, and where it is written."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def of_source(path: Path) -> Iterator[Sentence]:
    """The texts of a source file with blanks in them, in their order: docstrings, descriptions of
    fields, and messages, with `…` for what is inserted."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) for part in _parts(node)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        text = " ".join(_text(node).split())
        if id(node) not in parts and re.search(r"[A-Za-z]{2,} \S", text):
            yield Sentence(str(path.relative_to(HOME)), node.lineno, text)


def _parts(node: ast.AST) -> list[ast.expr]:
    return node.values if isinstance(node, ast.JoinedStr) else []


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return (
        str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"
    )


def of_document(path: Path) -> Iterator[Sentence]:
    """The paragraphs, headings and entries of a document, without its code."""
    paragraphs = re.split(r"\n\s*\n|\n(?=#|\s*- |\|)", path.read_text(encoding="utf-8"))
    line, is_code = 1, False
    text = path.read_text(encoding="utf-8")
    start = 0
    for paragraph in paragraphs:
        start = text.index(paragraph, start)
        line = text.count("\n", 0, start) + 1
        fences = paragraph.count("```")
        if not is_code and not fences and paragraph.strip():
            yield Sentence(str(path.relative_to(HOME)), line, " ".join(paragraph.split()))
        is_code ^= fences % 2 == 1


def of_recipe(path: Path) -> Iterator[Sentence]:
    """The comments of a recipe."""
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if comment := re.search(r"(?:^|\s)#\s*(\S.* .*)", text):
            yield Sentence(str(path.relative_to(HOME)), line, comment[1])


@cache
def all_sentences() -> tuple[Sentence, ...]:
    """Every sentence of the repository, document by document."""
    return tuple(_read_all())


def _read_all() -> Iterator[Sentence]:
    for name in (*DOCUMENTS, *sorted(str(p.relative_to(HOME)) for p in HOME.glob("docs/**/*.md"))):
        yield from of_document(HOME / name)
    for path in sorted(HOME.glob("recipes/**/*.yaml")):
        yield from of_recipe(path)
    for folder in SOURCES:
        for path in sorted((HOME / folder).rglob("*.py")):
            yield from of_source(path)
    for name in TEXTS:
        yield from of_document(HOME / name)


if __name__ == "__main__":
    for sentence in all_sentences():
        print(sentence)
