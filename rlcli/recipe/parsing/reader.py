"""Read YAML text into a tree with the position of every key and value.

Built from the parser's events, not by a YAML loader: a loader builds Python objects from tags,
expands aliases without limit, and crashes or stalls on deep nesting. Events are counted as they
arrive, so a hostile file is refused long before it is parsed to its end.
"""

from __future__ import annotations

import errno
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlcli.files import read_regular
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.scalars import ScalarError, core_scalar
from rlcli.recipe.parsing.syntax_errors import explain_syntax
from rlcli.recipe.parsing.tree import (
    Entry,
    Listing,
    MappingNode,
    Mark,
    Node,
    Scalar,
    children,
    kind_of,
    unusable,
)

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 10_000
"""Most values in a recipe, all its layers and overrides together."""
MAX_TEXT = 64 * 1024
"""Most characters in a value, also in one that references are inserted into."""
MAX_ALIASES = 100
MAX_ANCHORS = 1_000

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_FORBIDDEN = re.compile(
    f"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[{_BIDI}\u2028\u2029\ufeff]"
)


def read_file(
    path: Path, shown: str, problems: Problems, asked_by: Mark | None = None
) -> str | None:
    """The text of a recipe file, or None with the reason reported.
    Only regular files up to 1 MiB in UTF-8."""
    try:
        raw = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        problems.add(*_why_unreadable(error, shown), asked_by)
        return None
    return decode(raw, shown, problems)


def _why_unreadable(error: OSError | ValueError, shown: str) -> tuple[str, str]:
    if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
        return "R59", f"{shown[:200]!r} is not a valid file name"
    if error.errno == errno.EINVAL:
        return "R57", f"{shown} is not a regular file"
    if error.errno == errno.EFBIG:
        return "R16", f"{shown} has {error.strerror}"
    if isinstance(error, PermissionError):
        return "R58", f"permission denied: {shown}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "R51", f"no such file: {shown}"
    return "R58", f"{shown} cannot be read: {os.strerror(error.errno or 0)}"


def decode(raw: bytes, shown: str, problems: Problems) -> str | None:
    """Decode strict UTF-8 without control characters; None, with the reason reported,
    if it is not."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        problems.add("R19", f"{shown} is in UTF-16; a recipe is written in UTF-8")
        return None
    try:
        text = raw.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        mark = Mark(shown, before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1)
        problems.add("R18", f"byte 0x{raw[error.start]:02x} is not UTF-8", mark)
        return None
    return text


def parse(text: str, file: str, problems: Problems, first: Mark | None = None) -> Node | None:
    """The tree of a YAML text; None, with the reason reported, for one that cannot be read at all.

    Faults that do not prevent reading the rest (a key set twice, a tag, a number that is not
    finite) are reported, and their values in the tree are not `valid`. `first`: where the text
    begins, if not at 1:1.
    """
    origin = first or Mark(file, 1, 1)
    if match := _FORBIDDEN.search(text):
        problems.add(*_forbidden(match.group()), _mark_at(text, match.start(), origin))
        return None
    composer = _Composer(text, origin, problems)
    try:
        return composer.document()
    except yaml.MarkedYAMLError as error:
        if error.problem_mark is not None and "nesting depth" in (error.problem or ""):
            # Newer parsers look far ahead and have a limit of their own;
            # what is before it exceeds ours.
            return parse(text[: error.problem_mark.index], file, problems, first)
        problem = explain_syntax(error, text, composer.mark, composer.open_flows)
        problems.add(*problem, width=1)
        return None
    except (_Refused, yaml.YAMLError, ValueError, OverflowError) as error:
        if not isinstance(error, _Refused):
            problems.add("R07", f"not YAML: {error}", origin)
        return None


def _forbidden(character: str) -> tuple[str, str]:
    name = unicodedata.name(character, "")
    shown = f"U+{ord(character):04X}" + (f" {name}" if name else "")
    if unicodedata.category(character) in ("Cc", "Cs", "Cn"):
        return "R21", f"control character {shown} is not allowed"
    return (
        "R22",
        f"invisible character {shown} is not allowed; write it as an escape in a quoted string",
    )


def _mark_at(text: str, index: int, origin: Mark) -> Mark:
    lines = text[:index].replace("\r\n", "\n").replace("\r", "\n").split("\n")
    line, column = len(lines) - 1, len(lines[-1])
    return Mark(origin.file, origin.line + line, (origin.column if line == 0 else 1) + column)


class _Refused(Exception):
    """The file is refused as a whole; the problem is already reported."""


class _Composer:
    """Builds the tree from the parser's events, within limits."""

    def __init__(self, text: str, origin: Mark, problems: Problems):
        self.events: Iterator[Any] = yaml.parse(text, Loader=_Loader)
        self.origin = origin
        self.problems = problems
        self.anchors: dict[str, tuple[Node, int]] = {}
        self.open_anchors: set[str] = set()
        self.open_flows: list[Any] = []
        self.nodes = 0
        self.aliases = 0

    def mark(self, at: Any) -> Mark:
        column = at.column + (self.origin.column if at.line == 0 else 1)
        return Mark(self.origin.file, at.line + self.origin.line, column)

    def refuse(self, code: str, message: str, event: Any, hint: str | None = None) -> _Refused:
        self.problems.add(code, message, self.mark(event.start_mark), hint)
        return _Refused()

    def document(self) -> Node:
        """The single document of the stream."""
        node: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if node is not None:
                    raise self.refuse(
                        "R03", "a second document begins here; a recipe is one document", event
                    )
                node = self.node(next(self.events), 0)
        return node if node is not None else Scalar(None, self.origin)

    def node(self, event: Any, depth: int) -> Node:
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, depth)
        self.count(event, 1)
        if event.anchor is not None:
            if len(self.anchors) + len(self.open_anchors) >= MAX_ANCHORS:
                raise self.refuse("R10", f"more than {MAX_ANCHORS} anchors", event)
            self.open_anchors.add(event.anchor)
        before = self.nodes
        node = self.value(event, depth)
        if event.tag is not None:
            self.problems.add("R08", f"tags are not allowed: {event.tag}", node.mark)
            node = unusable(node.mark)
        if event.anchor is not None:
            self.open_anchors.discard(event.anchor)
            self.anchors[event.anchor] = (node, self.nodes - before + 1)
        return node

    def value(self, event: Any, depth: int) -> Node:
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if depth >= MAX_DEPTH:
            raise self.refuse("R14", f"nesting deeper than {MAX_DEPTH}", event)
        if event.flow_style:
            self.open_flows.append(event.start_mark)
        build = self.mapping if isinstance(event, yaml.MappingStartEvent) else self.listing
        node = build(event, depth)
        if event.flow_style:
            self.open_flows.pop()
        return node

    def count(self, event: Any, nodes: int) -> None:
        self.nodes += nodes
        self.problems.values += nodes
        if self.problems.values > MAX_NODES:
            raise self.refuse(
                "R10", f"more than {MAX_NODES} values, aliases and other layers counted", event
            )

    def alias(self, event: Any, depth: int) -> Node:
        if event.anchor in self.open_anchors:
            raise self.refuse("R11", f"alias *{event.anchor} refers to itself", event)
        if event.anchor not in self.anchors:
            raise self.refuse("R07", f"alias *{event.anchor} has no anchor above it", event)
        self.aliases += 1
        if self.aliases > MAX_ALIASES:
            raise self.refuse("R10", f"more than {MAX_ALIASES} aliases", event)
        node, size = self.anchors[event.anchor]
        self.count(event, size)
        if depth + _height(node) > MAX_DEPTH:
            raise self.refuse("R14", f"nesting deeper than {MAX_DEPTH} after aliases", event)
        return node

    def scalar(self, event: Any) -> Scalar:
        mark = self.mark(event.start_mark)
        if len(event.value) > MAX_TEXT:
            self.problems.add(
                "R65", f"a value of {len(event.value)} characters; at most {MAX_TEXT}", mark
            )
            return unusable(mark, event.value[:80])
        if event.style:
            return Scalar(event.value, mark, event.value, plain=False)
        try:
            return Scalar(core_scalar(event.value), mark, event.value)
        except ScalarError as error:
            self.problems.add(error.code, str(error), mark)
            return unusable(mark, event.value)

    def listing(self, start: Any, depth: int) -> Listing:
        items = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, depth + 1))
        return Listing(tuple(items), self.mark(start.start_mark))

    def mapping(self, start: Any, depth: int) -> MappingNode:
        entries: dict[str, Entry] = {}
        valid = True
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            mark = self.mark(event.start_mark)
            key = self.key(event, depth)
            value = next(self.events)
            if key is not None and start.flow_style and _lacks_a_space(key, event, value):
                if valid:
                    self.no_space(key, mark)
                valid = False
                continue
            node = self.node(value, depth + 1)
            if key is None:
                valid = False
            elif key in entries:
                self.problems.add(
                    "R05", f"{key} is set twice; first at line {entries[key].key.line}", mark
                )
            else:
                entries[key] = Entry(mark, node)
        return MappingNode(entries, self.mark(start.start_mark), valid=valid)

    def no_space(self, key: str, mark: Mark) -> None:
        name, _, text = key.partition(":")
        message = f"{key} has no space after its colon"
        hint = f"write {name}: {text}, with a space after each colon"
        self.problems.add("R07", message, mark, hint, width=len(key))

    def key(self, event: Any, depth: int) -> str | None:
        """A key's text; None, with the reason reported, if it is not text."""
        mark = self.mark(event.start_mark)
        if _is_plain(event) and event.value == "<<":
            hint = "use extends:, or an interpolation ${…}"
            self.problems.add("R05", "merge keys (<<) are not allowed", mark, hint)
            self.count(event, 1)
            return None
        node = self.node(event, depth + 1)
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            shown = f" {node.text}" if isinstance(node, Scalar) and node.text else ""
            self.problems.add(
                "R41", f"keys must be text, found {kind_of(node)}{shown}", mark, "quote it"
            )
            return None
        invisible = next(filter(_is_invisible, node.value), None)
        if invisible is not None:
            message = f"the key {node.value!r} has the invisible U+{ord(invisible):04X}"
            self.problems.add("R22", message, mark)
            return None
        return node.value


def _is_plain(event: Any) -> bool:
    """Whether an event is a scalar without quotes."""
    return isinstance(event, yaml.ScalarEvent) and not event.style


def _is_invisible(character: str) -> bool:
    return character != " " and unicodedata.category(character) in ("Cf", "Cc", "Zs", "Zl", "Zp")


def _lacks_a_space(key: str, event: Any, value: Any) -> bool:
    """Whether a key without a value, such as `dp:16` in `{dp:16}`, was meant as both."""
    is_empty = _is_plain(value) and not value.value
    return is_empty and not event.style and ":" in key.strip(":")


def _height(node: Node) -> int:
    """How many sections and lists are within each other."""
    if isinstance(node, Scalar):
        return 0
    return 1 + max((_height(child) for _, child in children(node)), default=0)
