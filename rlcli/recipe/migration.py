"""Rewrites a recipe of an older format as one of today's, in place: comments, order and layout stay as they are.

Format 2 made what prepares a batch for training a call of the graph. Until then the calls that train had its arguments,
and some interfaces existed in variants that are settings now. Interfaces declare both: `PREPARED_BY` and `REPLACES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlcli.errors import UsageError
from rlcli.recipe.components import argument_named, declared, replaced_interfaces
from rlcli.recipe.preparation import always_written
from rlcli.recipe.schema import FORMAT

Fields = dict[str, tuple[yaml.Node, yaml.Node]]
"""Key → the nodes of key and value."""


@dataclass(frozen=True)
class Migration:
    """A recipe in today's format, and what was changed."""

    text: str
    changes: tuple[str, ...] = ()
    """What was rewritten, one line each; empty if the recipe means the same in either format."""


def migrate(text: str) -> Migration:
    """The recipe in today's format. Raises UsageError R71 for calls that disagree on what is computed once now, and
    yaml.YAMLError if the text is not valid YAML."""
    return _Rewriting(text).migration()


@dataclass
class _Call:
    """A call as one layer writes it."""

    name: str
    key: yaml.Node
    node: yaml.Node
    fields: Fields
    interface: yaml.Node | None
    """The name of its interface."""
    args: yaml.Node | None

    @property
    def kind(self) -> str:
        return str(getattr(self.interface, "value", ""))

    @property
    def method(self) -> str:
        return str(self.fields["call"][1].value) if "call" in self.fields else ""


@dataclass
class _Rewriting:
    text: str
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    """(start, end, what replaces it)."""
    changes: list[str] = field(default_factory=list)

    def migration(self) -> Migration:
        root = _fields(yaml.compose(self.text, Loader=yaml.SafeLoader))
        train = _fields(root["train"][1]) if "train" in root else {}
        evaluation = _fields(train["eval"][1]) if "eval" in train else {}
        calls = list(_calls(root))
        replaced = replaced_interfaces()
        self._insert_preparation(calls, replaced)
        for call in (*calls, *_calls(evaluation)):
            if call.kind in replaced:
                self._replace_interface(call, root, replaced[call.kind])
        if self.changes:
            self._set_format(root)
        return Migration(_edited(self.text, self.edits), tuple(self.changes))

    def _insert_preparation(self, calls: list[_Call], replaced: Mapping[str, Any]) -> None:
        """Insert the call that prepares batches before the first that needs it, and take its arguments from others."""
        holding = {call.name: kind for call in calls if (kind := _prepared_by(call, replaced)) is not None}
        needing = [call for call in calls if call.name in holding and call.method == "train_step"]
        if not needing:
            return
        first, kind = needing[0], holding[needing[0].name]
        if any(always_written(kind) & always_written(call.kind) for call in calls):
            return
        arguments: dict[str, str] = {}
        for call in calls:
            if call.name in holding:
                arguments |= self._taken_arguments(call, kind, replaced, arguments)
        args = self._source(first.args) if isinstance(first.args, yaml.ScalarNode) else _flow(arguments)
        model = self._source(first.fields["model"][1]) if "model" in first.fields else first.name
        body = f"{{model: {model}, call: inference, interface: {{type: {kind}, args: {args}}}}}"
        self._insert_before(first.key, f"{kind}: {body}")
        self.changes.append(f"graph.{kind} computes once what {', '.join(call.name for call in needing)} read")

    def _taken_arguments(
        self, call: _Call, kind: str, replaced: Mapping[str, Any], earlier: Mapping[str, str]
    ) -> dict[str, str]:
        """The text of a call's arguments that are those of another interface; the call keeps its own."""
        if not isinstance(call.args, yaml.MappingNode):
            return {}
        own = replaced[call.kind]["by"] if call.kind in replaced else call.kind
        texts = {name: self._source(value) for name, (_, value) in _fields(call.args).items()}
        taken = {name: text for name, text in texts.items() if argument_named("interfaces", kind, name)}
        for name, text in taken.items():
            if earlier.get(name, text) != text:
                message = f"{name} is {earlier[name]} in one call and {text} in {call.name}, but is computed once"
                raise UsageError(message, hint=f"set {name} to the same value for all, then migrate", code="R71")
        moved = [name for name in taken if not argument_named("interfaces", own, name)]
        if moved:
            self._replace(call.args, _flow({name: text for name, text in texts.items() if name not in moved}))
            self.changes.append(f"graph.{call.name} gives {', '.join(moved)} to the call of {kind}")
        return taken

    def _replace_interface(self, call: _Call, root: Fields, replacement: Mapping[str, Any]) -> None:
        """Name today's interface, and set what was the default of the other."""
        assert call.interface is not None
        self._replace(call.interface, replacement["by"])
        self.changes.append(f"{call.kind} of {call.name} is {replacement['by']} with other settings")
        args = call.args
        if isinstance(args, yaml.ScalarNode):
            block = args.value.strip().removeprefix("${").removesuffix("}")
            args = root[block][1] if block in root else None  # of a layer below, which sets them
        entries = _fields(args)
        for name, value in replacement["args"].items():
            if entries and name not in entries and not any(name in edit[2] for edit in self.edits):
                self._insert_before(next(iter(entries.values()))[0], f"{name}: {value}")
                self.changes.append(f"{name}: {value}, which was the default of {call.kind}")

    def _set_format(self, root: Fields) -> None:
        if "format" in root:
            self._replace(root["format"][1], str(FORMAT))
        elif root:
            first = min(root.values(), key=lambda entry: entry[0].start_mark.index)[0]
            self._insert_before(first, f"format: {FORMAT}")

    def _insert_before(self, key: yaml.Node, entry: str) -> None:
        """A new entry of a mapping, before that of `key`: on a line of its own, unless several share the line."""
        start = key.start_mark.index
        line = self.text.rfind("\n", 0, start) + 1
        indent = self.text[line:start]
        self.edits.append((start, start, f"{entry}\n{indent}" if not indent.strip() else f"{entry}, "))

    def _replace(self, node: yaml.Node, text: str) -> None:
        end = node.end_mark.index
        while end > node.start_mark.index and self.text[end - 1].isspace():  # a block ends where the next line begins
            end -= 1
        self.edits.append((node.start_mark.index, end, text))

    def _source(self, node: yaml.Node) -> str:
        return self.text[node.start_mark.index : node.end_mark.index].strip()


def _prepared_by(call: _Call, replaced: Mapping[str, Any]) -> str | None:
    if call.kind in replaced:
        return str(replaced[call.kind]["prepared_by"])
    declaration = declared("interfaces", call.kind, "PREPARED_BY") if call.kind else None
    return next(iter(declaration.values()), None) if isinstance(declaration, dict) else None


def _calls(section: Fields) -> Iterator[_Call]:
    """The calls of the graph in a section."""
    for name, (key, node) in (_fields(section["graph"][1]) if "graph" in section else {}).items():
        fields = _fields(node)
        interface = fields["interface"][1] if "interface" in fields else None
        inner = _fields(interface)
        kind = inner["type"][1] if "type" in inner else interface if isinstance(interface, yaml.ScalarNode) else None
        yield _Call(name, key, node, fields, kind, inner["args"][1] if "args" in inner else None)


def _fields(node: yaml.Node | None) -> Fields:
    return {str(key.value): (key, value) for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}


def _flow(arguments: Mapping[str, str]) -> str:
    """A mapping on one line, of values as they are written."""
    return "{" + ", ".join(f"{name}: {' '.join(value.split())}" for name, value in arguments.items()) + "}"


def _edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text
