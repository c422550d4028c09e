"""Rewrites a recipe of an older format as one of today's, in place: comments,
order and layout stay as they are.

Format 2 made what prepares a batch for training a call of the graph. Until then the calls that
train had its arguments, and some interfaces existed in variants that are settings now. Interfaces
declare both: `PREPARED_BY` and `REPLACES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlcli.errors import UsageError
from rlcli.recipe.components import argument_named, declared, replaced_interfaces
from rlcli.recipe.preparation import always_written, disagreement, read_by
from rlcli.recipe.schema import FORMAT

Fields = dict[str, tuple[yaml.Node, yaml.Node]]
"""Key → the nodes of key and value."""

UNSAFE_IN_FLOW = re.compile(r"[,\[\]{}\n]|: | #")
"""What a plain scalar of block style may contain, but not one of flow style."""


@dataclass(frozen=True)
class Migration:
    """A recipe in today's format, and what was changed."""

    text: str
    changes: tuple[str, ...] = ()
    """What was rewritten, one line each; empty if the recipe means the same in either format."""


def migrate(text: str, file: str = "the recipe", below: Collection[str] = ()) -> Migration:
    """The recipe in today's format. `file`: its name in errors; `below`: the interfaces of the
    calls in the layers that it extends. Raises UsageError R71 for what has no single meaning today,
    and yaml.YAMLError if the text is not valid YAML."""
    migration = _Rewriting(text, file, frozenset(below)).migration()
    try:
        yaml.compose(migration.text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        message = f"cannot be rewritten automatically: {error}"
        raise UsageError(
            message, where=file, hint="write aliases out, then migrate", code="R71"
        ) from error
    return migration


@dataclass
class _Call:
    """A call as one layer writes it."""

    path: str
    name: str
    key: yaml.Node
    node: yaml.Node
    fields: Fields
    interface: Fields
    """The fields of its interface; with the shorthand, its name alone, as `type`."""
    replacement: Mapping[str, Any] | None
    """What replaces its interface today; None if it still exists."""

    @property
    def kind(self) -> str:
        return str(self.interface["type"][1].value) if "type" in self.interface else ""

    @property
    def new_kind(self) -> str:
        return str(self.replacement["by"]) if self.replacement is not None else self.kind

    @property
    def args(self) -> yaml.Node | None:
        return self.interface["args"][1] if "args" in self.interface else None

    @property
    def trains(self) -> bool:
        return "call" in self.fields and self.fields["call"][1].value == "train_step"

    @property
    def prepared_by(self) -> str | None:
        """The interface that has arguments which this one had in format 1."""
        if self.replacement is not None:
            return str(self.replacement["prepared_by"])
        declaration = declared("interfaces", self.kind, "PREPARED_BY") if self.kind else None
        return next(iter(declaration.values()), None) if isinstance(declaration, dict) else None


@dataclass
class _Changed:
    """Entries that are taken from a mapping, and text of those that it gets."""

    removed: set[str] = field(default_factory=set)
    added: dict[str, str] = field(default_factory=dict)


@dataclass
class _Rewriting:
    text: str
    file: str
    below: frozenset[str]
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    """(start, end, what replaces it)."""
    changed: dict[yaml.MappingNode, _Changed] = field(default_factory=dict)
    """The changes of each mapping; an alias is the node of its anchor."""
    changes: list[str] = field(default_factory=list)

    def migration(self) -> Migration:
        root = _fields(yaml.compose(self.text, Loader=yaml.SafeLoader))
        if "format" in root and root["format"][1].value == str(FORMAT):
            return Migration(self.text)
        replaced = replaced_interfaces()
        calls = list(_calls(root, "graph", replaced))
        eval_calls = list(
            _calls(_section(_section(root, "train"), "eval"), "train.eval.graph", replaced)
        )
        self._insert_preparation(calls, eval_calls, root)
        for call in (*calls, *eval_calls):
            if call.replacement is not None:
                self._replace_interface(call, call.replacement, root)
        if self.changes:
            self._set_format(root)
        for node, changed in self.changed.items():
            self._edit_entries(node, changed)
        return Migration(_edited(self.text, self.edits), tuple(self.changes))

    # -- the call that prepares batches ------------------------------------------------------------

    def _insert_preparation(
        self, calls: list[_Call], eval_calls: list[_Call], root: Fields
    ) -> None:
        """Insert the call that prepares batches before the first that needs it, and take its
        arguments from others."""
        holding = [call for call in calls if call.prepared_by is not None]
        needing = [call for call in holding if call.trains]
        if not needing:
            return
        kind = str(needing[0].prepared_by)
        others = [*self.below, *(call.kind for call in calls if call not in holding)]
        if any(always_written(kind) & always_written(other) for other in others):
            return
        for call in holding:
            self._refuse_renamed(call, kind, root)
        name = kind if kind not in {call.name for call in calls} else f"{kind}_"
        self._insert_call(name, kind, holding, needing)
        readers = " and ".join(call.name for call in needing)
        learn = "learn" if len(needing) > 1 else "learns"
        self.changes.append(f"graph.{name} is new: it computes once what {readers} {learn} from")
        for call in (*holding, *eval_calls):
            self._take_arguments(call, kind, f"graph.{name}", holding)

    def _insert_call(
        self, name: str, kind: str, holding: list[_Call], needing: list[_Call]
    ) -> None:
        first = needing[0]
        fields = {
            "model": _flow(first.fields["model"][1]) if "model" in first.fields else first.name,
            "call": "inference",
            "interface": _braces({"type": kind, "args": self._arguments(kind, holding, needing)}),
        }
        renamed = self._renamed_inputs(kind, needing)
        if renamed:
            fields["input_key_remap"] = _braces(renamed)
        self._insert_before(first.key, f"{name}: {_braces(fields)}")

    def _arguments(self, kind: str, holding: list[_Call], needing: list[_Call]) -> str:
        """The arguments of the new call as text: a reference that all calls share,
        or those that they have."""
        texts = dict.fromkeys(
            _flow(call.args) for call in needing if isinstance(call.args, yaml.ScalarNode)
        )
        references = [text for text in texts if text not in ("", "null")]
        written = _written_arguments(kind, needing if references else holding)
        if references and len([*references, *written]) > 1:
            message = (
                f"calls have different arguments for what {kind} computes once: "
                f"{', '.join([*references, *written])}"
            )
            hint = "give all of them the same block, then migrate"
            raise self._refusal(message, needing[0].key, hint)
        if references:
            return references[0]
        for name, nodes in written.items():
            self._check_agreement(kind, name, nodes, [call.name for call in needing])
        return _braces({name: _flow(next(iter(nodes.values()))) for name, nodes in written.items()})

    def _check_agreement(
        self, kind: str, name: str, written: dict[str, yaml.Node], needing: list[str]
    ) -> None:
        """Refuse an argument that calls have with different values. A call that trains means the
        default of what it does not set."""
        argument = argument_named("interfaces", kind, name)
        assert argument is not None
        unset = {call: (argument.default, "the default") for call in needing if call not in written}
        values = {
            call: (yaml.safe_load(_flow(node)), self._place(node)) for call, node in written.items()
        }
        if problem := disagreement(name, values | unset):
            hint = f"set {name} to the same value for all, then migrate"
            raise self._refusal(problem, [*written.values()][-1], hint)

    def _renamed_inputs(self, kind: str, needing: list[_Call]) -> dict[str, str]:
        """The renames that the new call needs. Lists of inputs are removed: they name what the
        calls read before."""
        renamed: dict[str, str] = {}
        for call in needing:
            remap = call.fields["input_key_remap"][1] if "input_key_remap" in call.fields else None
            meanings = {key: str(node.value) for key, (_, node) in _fields(remap).items()}
            renamed |= {
                key: meaning for key, meaning in meanings.items() if meaning in read_by(kind)
            }
            unread = {
                key for key, meaning in meanings.items() if meaning not in read_by(call.new_kind)
            }
            if unread and isinstance(remap, yaml.MappingNode):
                self._change(remap).removed |= unread
            if "inputs" in call.fields and isinstance(call.node, yaml.MappingNode):
                self._change(call.node).removed.add("inputs")
                self.changes.append(
                    f"{call.path} does not list its inputs: they are those of its interface"
                )
        return renamed

    def _take_arguments(self, call: _Call, kind: str, new_call: str, holding: list[_Call]) -> None:
        """Remove the arguments that a call does not have any more;
        the new call has those that are its own."""
        if call.prepared_by is None or not isinstance(call.args, yaml.MappingNode):
            return
        foreign = [
            name
            for name in _fields(call.args)
            if argument_named("interfaces", call.new_kind, name) is None
        ]
        moved = [name for name in foreign if argument_named("interfaces", kind, name) is not None]
        taken = {
            name
            for other in holding
            for name in foreign
            if argument_named("interfaces", other.new_kind, name)
        }
        if moved:
            verb = "is an argument" if len(moved) == 1 else "are arguments"
            self.changes.append(f"{', '.join(moved)} of {call.path} {verb} of {new_call}")
        if taken:
            self.changes.append(f"{call.path} takes no {', '.join(sorted(taken))}")
        self._change(call.args).removed |= {*moved, *taken}

    def _refuse_renamed(self, call: _Call, kind: str, root: Fields) -> None:
        """An argument that has another name and meaning now is left to the user."""
        for name, (key, _) in _fields(_resolved(call.args, root)).items():
            advice = (declared("interfaces", kind, "CHANGED") or {}).get(name)
            if advice is not None:
                message = f"{name} of {call.path} has another meaning now"
                raise self._refusal(message, key, f"{advice}, then migrate")

    # -- interfaces that existed in format 1 -------------------------------------------------------

    def _replace_interface(self, call: _Call, replacement: Mapping[str, Any], root: Fields) -> None:
        """Name today's interface, and set what was the default of the other,
        unless a layer below decides it."""
        key, name = call.interface["type"]
        self.changes.append(f"{call.path}: {call.kind} is now {call.new_kind}")
        defaults = {argument: str(value) for argument, value in replacement["args"].items()}
        if call.args is None and key is name:  # the shorthand
            self._replace(name, _braces({"type": call.new_kind, "args": _braces(defaults)}))
            return
        self._replace(name, call.new_kind)
        if call.args is None:
            self._insert_before(key, f"args: {_braces(defaults)}")
            return
        args = _resolved(call.args, root)
        is_of_layer_below = not call.trains or bool({call.kind, str(call.prepared_by)} & self.below)
        is_decided_below = args is not call.args and is_of_layer_below
        if isinstance(args, yaml.MappingNode) and not is_decided_below:
            self._add_missing(args, defaults, call.kind)

    def _add_missing(self, args: yaml.MappingNode, defaults: Mapping[str, str], kind: str) -> None:
        changed = self._change(args)
        missing = {
            name: text
            for name, text in defaults.items()
            if name not in {*_fields(args), *changed.added}
        }
        changed.added |= missing
        self.changes += [
            f"{name}: {text} is set, which was the default of {kind}"
            for name, text in missing.items()
        ]

    # -- edits -------------------------------------------------------------------------------------

    def _set_format(self, root: Fields) -> None:
        if "format" in root:
            self._replace(root["format"][1], str(FORMAT))
        else:
            self._insert_before(
                next(iter(root.values()))[0], f"format: {FORMAT}", below_comments=True
            )

    def _change(self, node: yaml.MappingNode) -> _Changed:
        return self.changed.setdefault(node, _Changed())

    def _insert_before(self, key: yaml.Node, entry: str, below_comments: bool = False) -> None:
        """A new entry of a mapping, before that of `key`: on a line of its own,
        unless several share the line."""
        start = key.start_mark.index
        line = self._line_start(start)
        indent = self.text[line:start]
        if indent.strip():
            self.edits.append((start, start, f"{entry}, "))
            return
        while not below_comments and line and self._previous_line(line).startswith(f"{indent}#"):
            line = self._line_start(line - 1)
        self.edits.append((line, line, f"{indent}{entry}\n"))

    def _replace(self, node: yaml.Node, text: str) -> None:
        self.edits.append((node.start_mark.index, self._end(node), text))

    def _edit_entries(self, node: yaml.MappingNode, changed: _Changed) -> None:
        """Remove entries of a mapping with their comments,
        and add others before those that remain."""
        remaining = [key for key, _ in node.value if key.value not in changed.removed]
        if not changed.added and len(remaining) == len(node.value):
            return
        if not remaining:
            self._replace(node, _braces(changed.added))
            return
        last = max(position for position, (key, _) in enumerate(node.value) if key in remaining)
        for position, (key, _) in enumerate(node.value):
            if key.value in changed.removed:
                start, end = self._span(node, position, is_at_the_end=position > last)
                self.edits.append((start, end, ""))
        for name, text in changed.added.items():
            self._insert_before(remaining[0], f"{name}: {text}")

    def _span(self, node: yaml.MappingNode, position: int, is_at_the_end: bool) -> tuple[int, int]:
        """Where the text of an entry starts and ends: with its lines, or with the comma after it
        or, if no entry remains after it, before it."""
        key, value = node.value[position]
        if not node.flow_style:
            following = self.text.find("\n", self._end(value))
            return self._line_start(key.start_mark.index), following + 1 or len(self.text)
        if is_at_the_end:
            return self._end(node.value[position - 1][1]), self._end(value)
        return key.start_mark.index, node.value[position + 1][0].start_mark.index

    def _end(self, node: yaml.Node) -> int:
        """Where a node ends: a block's own mark is where the next one begins."""
        if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
            last = node.value[-1]
            return self._end(last[1] if isinstance(last, tuple) else last)
        end = node.end_mark.index
        while end > node.start_mark.index and self.text[end - 1].isspace():
            end -= 1
        return int(end)

    def _line_start(self, index: int) -> int:
        return self.text.rfind("\n", 0, index) + 1

    def _previous_line(self, start: int) -> str:
        return self.text[self._line_start(start - 1) : start]

    def _place(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def _refusal(self, message: str, node: yaml.Node, hint: str) -> UsageError:
        return UsageError(message, where=self._place(node), hint=hint, code="R71")


def _calls(section: Fields, path: str, replaced: Mapping[str, Any]) -> Iterator[_Call]:
    """The calls of the graph in a section."""
    for name, (key, node) in _section(section, "graph").items():
        fields = _fields(node)
        interface = fields["interface"][1] if "interface" in fields else None
        inner = _fields(interface)
        if isinstance(interface, yaml.ScalarNode):
            inner = {"type": (interface, interface)}
        kind = str(inner["type"][1].value) if "type" in inner else ""
        yield _Call(f"{path}.{name}", name, key, node, fields, inner, replaced.get(kind))


def _written_arguments(kind: str, calls: list[_Call]) -> dict[str, dict[str, yaml.Node]]:
    """Argument of an interface → the calls that have it, each with the value."""
    written: dict[str, dict[str, yaml.Node]] = {}
    for call in calls:
        for name, (_, node) in _fields(call.args).items():
            if argument_named("interfaces", kind, name) is not None:
                written.setdefault(name, {})[call.name] = node
    return written


def _section(fields: Fields, name: str) -> Fields:
    return _fields(fields[name][1]) if name in fields else {}


def _fields(node: yaml.Node | None) -> Fields:
    return (
        {str(key.value): (key, value) for key, value in node.value}
        if isinstance(node, yaml.MappingNode)
        else {}
    )


def _resolved(args: yaml.Node | None, root: Fields) -> yaml.Node | None:
    """The arguments themselves, where a reference names a block of the same file."""
    if not isinstance(args, yaml.ScalarNode):
        return args
    block = args.value.strip().removeprefix("${").removesuffix("}")
    return root[block][1] if block in root else None


def _braces(entries: Mapping[str, str]) -> str:
    """A mapping on one line, of texts."""
    return "{" + ", ".join(f"{name}: {text}" for name, text in entries.items()) + "}"


def _flow(node: yaml.Node) -> str:
    """A node on one line, as it may stand in a mapping of flow style."""
    if isinstance(node, yaml.MappingNode):
        return _braces({str(key.value): _flow(value) for key, value in node.value})
    if isinstance(node, yaml.SequenceNode):
        return "[" + ", ".join(map(_flow, node.value)) + "]"
    is_plain = (
        isinstance(node, yaml.ScalarNode)
        and node.style is None
        and not UNSAFE_IN_FLOW.search(node.value)
    )
    return str(node.value) if is_plain else json.dumps(node.value, ensure_ascii=False)


def _edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, replacement in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        text = text[:start] + replacement + text[end:]
    return text
