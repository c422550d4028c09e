"""Rewrites a recipe of an older format as one of today's, in place: comments,
order and layout stay as they are.

Format 2 made what prepares a batch for training a call of the graph. Until then the calls that
train had its arguments, and some interfaces existed in variants that are settings now. Interfaces
declare both: `PREPARED_BY` and `REPLACES`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlcli.errors import UsageError
from rlcli.recipe.authoring.yaml_edits import Fields, YamlEdits, braces, fields_of, on_one_line
from rlcli.recipe.components import (
    argument_named,
    declared_mapping,
    has_argument,
    replaced_interfaces,
)
from rlcli.recipe.expansion.preparation import always_written, disagreement, read_by
from rlcli.recipe.schema import FORMAT


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
    root = fields_of(yaml.compose(text, Loader=yaml.SafeLoader))
    if "format" in root and root["format"][1].value == str(FORMAT):
        return Migration(text)
    rewriting = _Rewriting(root, file, frozenset(below), YamlEdits(text))
    rewriting.rewrite()
    migrated = rewriting.edits.result()
    try:
        yaml.compose(migrated, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        message = f"cannot be rewritten automatically: {error}"
        raise UsageError(
            message, where=file, hint="write aliases out, then migrate", code="R71"
        ) from error
    return Migration(migrated, tuple(rewriting.changes))


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
        declaration = declared_mapping("interfaces", self.kind, "PREPARED_BY")
        return next(iter(declaration.values()), None)

    @property
    def renamed_inputs(self) -> dict[str, str]:
        """Name in the batch → name that the interface reads."""
        remap = self.fields["input_key_remap"][1] if "input_key_remap" in self.fields else None
        return {key: str(node.value) for key, (_, node) in fields_of(remap).items()}


@dataclass(frozen=True)
class _Preparation:
    """The call that prepares batches, which a graph of format 1 does not have."""

    kind: str
    """Its interface."""
    name: str
    holding: Sequence[_Call]
    """The calls that may have its arguments."""
    needing: Sequence[_Call]
    """Those of them that train on the batches."""

    @property
    def path(self) -> str:
        return f"graph.{self.name}"

    @property
    def renamed_inputs(self) -> dict[str, str]:
        """The renames of the calls that need it, as far as it reads what these mean."""
        return {
            key: meaning
            for call in self.needing
            for key, meaning in call.renamed_inputs.items()
            if meaning in read_by(self.kind)
        }


@dataclass
class _Rewriting:
    """A recipe of format 1 that is being rewritten."""

    root: Fields
    file: str
    below: frozenset[str]
    edits: YamlEdits
    changes: list[str] = field(default_factory=list)

    def rewrite(self) -> None:
        replaced = replaced_interfaces()
        calls = list(_calls(self.root, "graph", replaced))
        evaluation = _section(_section(self.root, "train"), "eval")
        eval_calls = list(_calls(evaluation, "train.eval.graph", replaced))
        preparation = self._missing_preparation(calls)
        if preparation is not None:
            self._insert_preparation(preparation, eval_calls)
        for call in (*calls, *eval_calls):
            if call.replacement is not None:
                self._replace_interface(call, call.replacement)
        if self.changes:
            self._set_format()

    # -- the call that prepares batches ------------------------------------------------------------

    def _missing_preparation(self, calls: Sequence[_Call]) -> _Preparation | None:
        """The call that the graph lacks; None if no call needs one, or another writes the same."""
        holding = [call for call in calls if call.prepared_by is not None]
        needing = [call for call in holding if call.trains]
        if not needing:
            return None
        kind = str(needing[0].prepared_by)
        others = [*self.below, *(call.kind for call in calls if call.prepared_by is None)]
        if any(always_written(kind) & always_written(other) for other in others):
            return None
        is_taken = any(call.name == kind for call in calls)
        return _Preparation(kind, f"{kind}_" if is_taken else kind, holding, needing)

    def _insert_preparation(self, preparation: _Preparation, eval_calls: Sequence[_Call]) -> None:
        """Insert the call before the first that needs it, and take its arguments from others."""
        for call in preparation.holding:
            self._refuse_changed_arguments(call, preparation.kind)
        self._insert_call(preparation)
        for call in preparation.needing:
            self._remove_inputs(call)
        readers = [call.name for call in preparation.needing]
        learn = "learn" if len(readers) > 1 else "learns"
        self.changes.append(
            f"{preparation.path} is new: it computes once what {' and '.join(readers)} {learn} from"
        )
        for call in (*preparation.holding, *eval_calls):
            self._take_arguments(call, preparation)

    def _refuse_changed_arguments(self, call: _Call, kind: str) -> None:
        """An argument that has another name and meaning now is left to the user."""
        for name, (key, _) in fields_of(self._resolved(call.args)).items():
            advice = declared_mapping("interfaces", kind, "CHANGED").get(name)
            if advice is not None:
                message = f"{name} of {call.path} has another meaning now"
                raise self._refusal(message, key, f"{advice}, then migrate")

    def _insert_call(self, preparation: _Preparation) -> None:
        first = preparation.needing[0]
        args = self._arguments(preparation)
        fields = {
            "model": on_one_line(first.fields["model"][1])
            if "model" in first.fields
            else first.name,
            "call": "inference",
            "interface": braces({"type": preparation.kind, "args": args}),
        }
        if preparation.renamed_inputs:
            fields["input_key_remap"] = braces(preparation.renamed_inputs)
        self.edits.insert_before(first.key, f"{preparation.name}: {braces(fields)}")

    def _arguments(self, preparation: _Preparation) -> str:
        """The arguments of the new call as text: a reference that all calls share,
        or those that they have."""
        kind, needing = preparation.kind, preparation.needing
        references = _references(needing)
        if not references:
            written = _written_arguments(kind, preparation.holding)
            for name, values in written.items():
                self._check_agreement(preparation, name, values)
            return braces({name: on_one_line(_first(nodes)) for name, nodes in written.items()})
        different = [*references, *_written_arguments(kind, needing)]
        if len(different) > 1:
            message = (
                f"calls have different arguments for what {kind} computes once: "
                f"{', '.join(different)}"
            )
            hint = "give all of them the same block, then migrate"
            raise self._refusal(message, needing[0].key, hint)
        return references[0]

    def _check_agreement(
        self, preparation: _Preparation, name: str, written: Mapping[str, yaml.Node]
    ) -> None:
        """Refuse an argument that calls have with different values. A call that trains means the
        default of what it does not set."""
        argument = argument_named("interfaces", preparation.kind, name)
        assert argument is not None
        values = {
            call: (yaml.safe_load(on_one_line(node)), self._location(node))
            for call, node in written.items()
        }
        for call in preparation.needing:
            values.setdefault(call.name, (argument.default, "the default"))
        if problem := disagreement(name, values):
            hint = f"set {name} to the same value for all, then migrate"
            raise self._refusal(problem, [*written.values()][-1], hint)

    def _remove_inputs(self, call: _Call) -> None:
        """Remove what says what a call read before: its list of inputs, and the renames of those
        that only the new call reads."""
        read = read_by(call.new_kind)
        unread = [key for key, meaning in call.renamed_inputs.items() if meaning not in read]
        if unread:
            self.edits.remove_entries(_mapping(call.fields["input_key_remap"][1]), unread)
        if "inputs" in call.fields:
            self.edits.remove_entries(_mapping(call.node), ["inputs"])
            self.changes.append(
                f"{call.path} does not list its inputs: they are those of its interface"
            )

    def _take_arguments(self, call: _Call, preparation: _Preparation) -> None:
        """Remove the arguments that a call does not have any more;
        the new call has those that are its own."""
        if call.prepared_by is None or not isinstance(call.args, yaml.MappingNode):
            return
        foreign = [
            name
            for name in fields_of(call.args)
            if not has_argument("interfaces", call.new_kind, name)
        ]
        moved = [name for name in foreign if has_argument("interfaces", preparation.kind, name)]
        others = {other.new_kind for other in preparation.holding}
        useless = [
            name
            for name in foreign
            if any(has_argument("interfaces", kind, name) for kind in others)
        ]
        if moved:
            verb = "is an argument" if len(moved) == 1 else "are arguments"
            self.changes.append(f"{', '.join(moved)} of {call.path} {verb} of {preparation.path}")
        if useless:
            self.changes.append(f"{call.path} takes no {', '.join(sorted(useless))}")
        self.edits.remove_entries(call.args, [*moved, *useless])

    # -- interfaces that existed in format 1 -------------------------------------------------------

    def _replace_interface(self, call: _Call, replacement: Mapping[str, Any]) -> None:
        """Name today's interface, and set what was the default of the other,
        unless a layer below decides it."""
        key, name = call.interface["type"]
        self.changes.append(f"{call.path}: {call.kind} is now {call.new_kind}")
        defaults = {argument: str(value) for argument, value in replacement["args"].items()}
        is_shorthand = key is name
        if is_shorthand:
            self.edits.replace(name, braces({"type": call.new_kind, "args": braces(defaults)}))
            return
        self.edits.replace(name, call.new_kind)
        if call.args is None:
            self.edits.insert_before(key, f"args: {braces(defaults)}")
        else:
            self._add_defaults(call, defaults)

    def _add_defaults(self, call: _Call, defaults: Mapping[str, str]) -> None:
        args = self._resolved(call.args)
        if isinstance(args, yaml.MappingNode) and not self._is_decided_below(call, args):
            for argument, text in self.edits.add_entries(args, defaults).items():
                self.changes.append(
                    f"{argument}: {text} is set, which was the default of {call.kind}"
                )

    def _is_decided_below(self, call: _Call, args: yaml.MappingNode) -> bool:
        """Whether a layer below decides about the arguments: they are a shared block, and the call
        is known there already."""
        is_block = args is not call.args
        is_known_below = not call.trains or bool({call.kind, str(call.prepared_by)} & self.below)
        return is_block and is_known_below

    # -- the rest ----------------------------------------------------------------------------------

    def _set_format(self) -> None:
        if "format" in self.root:
            self.edits.replace(self.root["format"][1], str(FORMAT))
            return
        first_key, _ = next(iter(self.root.values()))
        self.edits.insert_before(first_key, f"format: {FORMAT}", below_comments=True)

    def _resolved(self, args: yaml.Node | None) -> yaml.Node | None:
        """The arguments themselves, where a reference names a block of the same file."""
        if not isinstance(args, yaml.ScalarNode):
            return args
        block = args.value.strip().removeprefix("${").removesuffix("}")
        return self.root[block][1] if block in self.root else None

    def _location(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def _refusal(self, message: str, node: yaml.Node, hint: str) -> UsageError:
        return UsageError(message, where=self._location(node), hint=hint, code="R71")


def _calls(section: Fields, path: str, replaced: Mapping[str, Any]) -> Iterator[_Call]:
    """The calls of the graph in a section."""
    for name, (key, node) in _section(section, "graph").items():
        fields = fields_of(node)
        interface = fields["interface"][1] if "interface" in fields else None
        inner = fields_of(interface)
        if isinstance(interface, yaml.ScalarNode):
            inner = {"type": (interface, interface)}
        kind = str(inner["type"][1].value) if "type" in inner else ""
        yield _Call(f"{path}.{name}", name, key, node, fields, inner, replaced.get(kind))


def _section(fields: Fields, name: str) -> Fields:
    return fields_of(fields[name][1]) if name in fields else {}


def _mapping(node: yaml.Node) -> yaml.MappingNode:
    """A node that is known to have fields."""
    assert isinstance(node, yaml.MappingNode)
    return node


def _references(calls: Sequence[_Call]) -> list[str]:
    """The blocks that calls name as their arguments, each once."""
    texts = [on_one_line(call.args) for call in calls if isinstance(call.args, yaml.ScalarNode)]
    return [text for text in dict.fromkeys(texts) if text not in ("", "null")]


def _written_arguments(kind: str, calls: Sequence[_Call]) -> dict[str, dict[str, yaml.Node]]:
    """Argument of an interface → the calls that have it, each with the value."""
    written: dict[str, dict[str, yaml.Node]] = {}
    for call in calls:
        for name, (_, node) in fields_of(call.args).items():
            if has_argument("interfaces", kind, name):
                written.setdefault(name, {})[call.name] = node
    return written


def _first(nodes: Mapping[str, yaml.Node]) -> yaml.Node:
    return next(iter(nodes.values()))
