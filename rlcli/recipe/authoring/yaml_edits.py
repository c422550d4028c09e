"""Edits of a YAML text that leave its comments, its order and its layout as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import yaml

Fields = dict[str, tuple[yaml.Node, yaml.Node]]
"""Key → the nodes of key and value."""

UNSAFE_IN_FLOW = re.compile(r"[,\[\]{}\n]|: | #")
"""What a plain scalar of block style may contain, but not one of flow style."""


def fields_of(node: yaml.Node | None) -> Fields:
    """The entries of a mapping; none for any other node."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {str(key.value): (key, value) for key, value in node.value}


def braces(entries: Mapping[str, str]) -> str:
    """A mapping of texts on one line."""
    return "{" + ", ".join(f"{name}: {text}" for name, text in entries.items()) + "}"


def on_one_line(node: yaml.Node) -> str:
    """The text of a node in flow style, which may be part of a mapping in that style."""
    if isinstance(node, yaml.MappingNode):
        return braces({str(key.value): on_one_line(value) for key, value in node.value})
    if isinstance(node, yaml.SequenceNode):
        return "[" + ", ".join(map(on_one_line, node.value)) + "]"
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if is_plain and not UNSAFE_IN_FLOW.search(node.value):
        return str(node.value)
    return json.dumps(node.value, ensure_ascii=False)


@dataclass
class _EntryChanges:
    """What becomes of the entries of a mapping."""

    removed: set[str] = field(default_factory=set)
    added: dict[str, str] = field(default_factory=dict)
    """Key → the text of its value."""


class YamlEdits:
    """Collects edits of a text, by the nodes that it was composed of; `result` makes them."""

    def __init__(self, text: str):
        self._text = text
        self._line_end = "\r\n" if "\r\n" in text else "\n"
        self._edits: list[tuple[int, int, str]] = []
        """(start, end, what replaces it)."""
        self._entries: dict[yaml.MappingNode, _EntryChanges] = {}
        """The changes of each mapping, collected because several may remove the same entry; an
        alias is the node of its anchor."""

    def replace(self, node: yaml.Node, text: str) -> None:
        self._edits.append((node.start_mark.index, self._end(node), text))

    def insert_before(self, key: yaml.Node, entry: str, *, below_comments: bool = False) -> None:
        """Insert an entry before that of `key`: on a line of its own, above the comments of that
        entry or below them, unless several entries share the line."""
        start = key.start_mark.index
        line = self._line_start(start)
        indent = self._text[line:start]
        if indent.strip():
            self._edits.append((start, start, f"{entry}, "))
            return
        while not below_comments and line and self._line_before(line).startswith(f"{indent}#"):
            line = self._line_start(line - 1)
        self._edits.append((line, line, f"{indent}{entry}{self._line_end}"))

    def remove_entries(self, mapping: yaml.MappingNode, names: Collection[str]) -> None:
        """Remove the entries with these names, as far as there are any."""
        self._changes_of(mapping).removed.update(names)

    def add_entries(self, mapping: yaml.MappingNode, entries: Mapping[str, str]) -> dict[str, str]:
        """Add the entries that a mapping does not have yet: names and texts. Returns these."""
        changes = self._changes_of(mapping)
        present = {*fields_of(mapping), *changes.added}
        missing = {name: text for name, text in entries.items() if name not in present}
        changes.added |= missing
        return missing

    def result(self) -> str:
        """The edited text."""
        for mapping, changes in self._entries.items():
            self._edit_entries(mapping, changes)
        self._entries.clear()
        text = self._text
        for start, end, replacement in sorted(self._edits, key=lambda edit: edit[:2], reverse=True):
            text = text[:start] + replacement + text[end:]
        return text

    def _changes_of(self, mapping: yaml.MappingNode) -> _EntryChanges:
        return self._entries.setdefault(mapping, _EntryChanges())

    def _edit_entries(self, mapping: yaml.MappingNode, changes: _EntryChanges) -> None:
        keys = [key for key, _ in mapping.value]
        remaining = [key for key in keys if key.value not in changes.removed]
        if not changes.added and len(remaining) == len(keys):
            return
        if not remaining:
            self.replace(mapping, braces(changes.added))
            return
        last_remaining = keys.index(remaining[-1])
        for number, key in enumerate(keys):
            if key.value in changes.removed:
                start, end = self._span(mapping, number, is_at_the_end=number > last_remaining)
                self._edits.append((start, end, ""))
        for name, text in changes.added.items():
            self.insert_before(remaining[0], f"{name}: {text}")

    def _span(
        self, mapping: yaml.MappingNode, number: int, *, is_at_the_end: bool
    ) -> tuple[int, int]:
        """[start, end) of the text of an entry: its lines in block style. In flow style it includes
        the comma after it, or the one before it if no entry remains after it."""
        key, value = mapping.value[number]
        if not mapping.flow_style:
            line_end = self._text.find("\n", self._end(value))
            end = line_end + 1 if line_end >= 0 else len(self._text)
            return self._line_start(key.start_mark.index), end
        if is_at_the_end:
            _, value_before = mapping.value[number - 1]
            return self._end(value_before), self._end(value)
        next_key, _ = mapping.value[number + 1]
        return key.start_mark.index, next_key.start_mark.index

    def _end(self, node: yaml.Node) -> int:
        """Where a node ends. (The mark of a block is where the next one begins.)"""
        if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
            last = node.value[-1]
            return self._end(last[1] if isinstance(node, yaml.MappingNode) else last)
        end = node.end_mark.index
        while end > node.start_mark.index and self._text[end - 1].isspace():
            end -= 1
        return int(end)

    def _line_start(self, index: int) -> int:
        return self._text.rfind("\n", 0, index) + 1

    def _line_before(self, line: int) -> str:
        """The line before that which starts at `line`."""
        return self._text[self._line_start(line - 1) : line]
