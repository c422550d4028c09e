"""Everything about a value: its default, each layer that sets it, and where references carry it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlcli.errors import UsageError
from rlcli.recipe.changes import Kind, kind_of_change
from rlcli.recipe.introspection.fields import Field, completed, field_of, yaml_word
from rlcli.recipe.parsing.interpolation import Reference, interpolate, references_in
from rlcli.recipe.parsing.places import covers
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.removal import place_of, removed_at
from rlcli.recipe.parsing.tree import (
    DEFAULT,
    KeyPath,
    MappingNode,
    Node,
    Scalar,
    at,
    dotted,
    leaves,
    plain,
    plain_leaves,
)
from rlcli.recipe.resolve import Resolved, Setting
from rlcli.recipe.rollouts import as_role
from rlcli.recipe.schema import SECTIONS
from rlcli.recipe.suggest import suggest_key
from rlcli.recipe.validation.argument_words import argument_words
from rlcli.spelling import nearest_name


@dataclass(frozen=True)
class ValueStep:
    """One place that sets the key."""

    where: str
    """`file:line:col`, `command line` or `default`."""
    value: str
    """As written."""
    note: str | None = None
    """Where a default is declared, or which reference leads there."""
    wins: bool = False


@dataclass(frozen=True)
class Use:
    """A key of the recipe that receives the value."""

    key: str
    through: str | None = None
    """The reference, such as `${ppo}`; None for the key itself."""


@dataclass(frozen=True)
class Explanation:
    """Everything known about one value."""

    key: str
    value: Any
    field: Field | None
    """None for a free-form key."""
    steps: tuple[ValueStep, ...]
    uses: tuple[Use, ...]
    topology: str
    """`topology` if a change moves roles between devices, `batch` if it alters the arithmetic of a
    step, or `none`."""
    on_resume: Kind
    """Effect of a change on a half-finished run."""
    removed: str | None = None
    """Where a null removes the key, or a section around it."""


@dataclass(frozen=True)
class Leaf:
    """One value in a section."""

    key: str
    value: Any
    origin: str


def explain(resolved: Resolved, key: str) -> Explanation | list[Leaf]:
    """Explain a value, or list the values of a section.
    Raises UsageError R42 for an unknown key."""
    values = known_values(resolved)
    path = as_role(resolved.recipe, tuple(key.split(".")))
    if path in values:
        return _explanation(resolved, path, values)
    below = [candidate for candidate in values if candidate[: len(path)] == path]
    if not below:
        removed = next(
            filter(None, (removed_at(resolved.written, path[:n]) for n in range(1, len(path) + 1))),
            None,
        )
        if removed is None or not resolved.history(path):
            raise _unknown(resolved, key, values)
        explanation = _explanation(resolved, path, {path: None})
        *earlier, last = (replace(step, wins=False) for step in explanation.steps)
        return replace(
            explanation,
            steps=(*earlier, replace(last, wins=True)),
            uses=(),
            removed=place_of(removed),
        )
    places = {leaf: _effective(resolved, leaf) for leaf in below}
    return [
        Leaf(dotted(path), values[path], str(node.mark) if node else DEFAULT)
        for path, node in places.items()
    ]


def known_values(resolved: Resolved) -> dict[KeyPath, Any]:
    """Every key that can be set and its value: the schema's, those of each component's arguments,
    and those of the recipe's own blocks."""
    document = completed(resolved.to_json())
    values = dict(plain_leaves(document))
    values |= {path: plain(node) for path, node in leaves(_blocks(resolved)) if path}
    for reference in references_in(resolved.written):
        # a block also receives its nested values
        if reference.is_alone and reference.target[0] not in SECTIONS:
            for path in [p for p in values if p[: len(reference.path)] == reference.path]:
                key = (*reference.target, *path[len(reference.path) :])
                # null may restore a default
                values[key] = values[path] if values.get(key) is None else values[key]
    return {
        path: value
        for path, value in values.items()
        if not (value == {} and _is_prefix(path, values))
    }


def _effective(resolved: Resolved, path: KeyPath) -> Node | None:
    """The effective value as some layer sets it, also for keys of blocks."""
    return at(resolved.tree if path[0] in SECTIONS else _blocks(resolved), path)


def _is_prefix(path: KeyPath, values: dict[KeyPath, Any]) -> bool:
    return any(len(longer) > len(path) and longer[: len(path)] == path for longer in values)


def _blocks(resolved: Resolved) -> MappingNode:
    """The recipe's own blocks, resolved."""
    tree = interpolate(resolved.written, Problems(), os.environ)
    return MappingNode(
        {name: entry for name, entry in tree.entries.items() if name not in SECTIONS}, tree.mark
    )


# -- one value -------------------------------------------------------------------------------------


def _explanation(resolved: Resolved, path: KeyPath, values: dict[KeyPath, Any]) -> Explanation:
    uses = _uses(resolved.written, path)
    uses = {use: through for use, through in uses.items() if "args" not in use or use in values}
    carried = [use for use in uses if use[0] in SECTIONS]
    meant = path if path[0] in SECTIONS else next(iter(carried), path)
    field = field_of(meant, resolved.tree)
    ours = [path] if path[0] in SECTIONS else []
    return Explanation(
        key=dotted(path),
        value=values[path],
        field=field,
        steps=tuple(_steps(resolved, path, field, values[path])),
        uses=tuple(Use(dotted(p)) for p in ours if _is_read(p))
        + tuple(Use(dotted(p), uses[p]) for p in carried),
        topology=_effect([*ours, *carried]),
        on_resume=max(
            (kind_of_change(p, resolved.recipe) for p in [*ours, *carried]),
            key=list(Kind).index,
            default=Kind.SAFE,
        ),
    )


def _steps(
    resolved: Resolved, path: KeyPath, field: Field | None, value: Any
) -> Iterator[ValueStep]:
    written = {
        node.mark: node.text
        for tree in (*(layer.tree for layer in resolved.layers), *resolved.override_trees)
        for _, node in leaves(tree)
        if isinstance(node, Scalar) and node.text
    }
    node = _effective(resolved, path)
    history = resolved.history(path)
    mark = node.mark if node is not None else None
    winner = max((i for i, setting in enumerate(history) if setting.mark == mark), default=None)
    if winner is not None and history[winner].value is None and value is not None:
        winner = None  # null restored the default
    decided = node is not None and node.mark.is_default
    # a reference to something unset: it brings a default
    if decided and history and history[-1].value is not None:
        winner, decided = len(history) - 1, False
    default = (
        yaml_word(plain(node))
        if node is not None and decided
        else field.default_text
        if field
        else None
    )
    if default is not None:
        note = (
            "chosen by rlcli"
            if decided and path[-1] == "type"
            else field.location
            if field
            else None
        )
        if decided and node is not None and node.mark.file != DEFAULT:
            note = node.mark.file.removeprefix(f"{DEFAULT}, ")
        yield ValueStep(DEFAULT, default, note, wins=winner is None)
    for index, setting in enumerate(history):
        value = written.get(setting.mark) or yaml_word(setting.value).replace("$${", "${")
        yield ValueStep(str(setting.mark), value, _note(setting), wins=index == winner)


def _note(setting: Setting) -> str | None:
    if setting.removes:
        return f"removes {setting.removes}"
    return f"as {setting.via}, taken over at {setting.through}" if setting.via else None


def _is_read(path: KeyPath) -> bool:
    """Whether a key has an effect of its own: interfaces read sampling settings only by
    reference."""
    return path[0] != "generation" or path[1:] == ("responses_per_prompt",)


# -- where it goes ---------------------------------------------------------------------------------


def _uses(tree: MappingNode, path: KeyPath) -> dict[KeyPath, str]:
    """The keys that receive the value at a path through references, nearest first,
    each with the last reference."""
    references = list(references_in(tree))
    references_by_key: dict[KeyPath, str] = {}
    waiting = [path]
    while waiting:
        target = waiting.pop(0)
        for reference in references:
            receiver = _carried_to(reference, target)
            if receiver is None or receiver == path or receiver in references_by_key:
                continue
            if receiver != reference.path and at(tree, receiver) is not None:
                continue  # set there by a layer, on top of what the reference brings
            waiting.append(receiver)
            references_by_key[receiver] = f"${{{'.'.join(map(str, reference.target))}}}"
    return references_by_key


def _carried_to(reference: Reference, target: KeyPath) -> KeyPath | None:
    size = len(reference.target)
    if reference.is_alone and target[:size] == reference.target:
        return (*reference.path, *target[size:])
    return reference.path if target == reference.target else None


TOPOLOGY = ("cluster", "launch.type", "models.*.mesh", "models.*.devices")
BATCH = (
    "train.prompts_per_step", "train.steps", "train.epochs", "train.max_tokens_per_microbatch",
    "generation.responses_per_prompt", "graph.*.interface.args.minibatches",
    "graph.*.call", "graph.*.model", "graph.*.interface.type",
)  # fmt: skip


def _effect(paths: list[KeyPath]) -> str:
    for word, rules in (("topology", TOPOLOGY), ("batch", BATCH)):
        if any(covers(tuple(rule.split(".")), path) for rule in rules for path in paths):
            return word
    return "none"


def _unknown(resolved: Resolved, key: str, values: dict[KeyPath, Any]) -> UsageError:
    """Likely intended keys: the same last word elsewhere, a similar key,
    or another framework's word."""
    keys = [dotted(path) for path in values]
    last = key.rpartition(".")[2]
    same = [candidate for candidate in keys if candidate.rpartition(".")[2] == last]
    sections = {dotted(path[:depth]) for path in values for depth in range(1, len(path))}
    same = same or [section for section in sorted(sections) if section.endswith(f".{key}")]
    same = same or [candidate for candidate in keys if last in re.split(r"[._]", candidate)]
    # The block that feeds all comes first.
    same.sort(key=lambda candidate: (candidate.split(".")[0] in SECTIONS, candidate.count(".")))
    near = same[0] if same else nearest_name(key, [*keys, *sections])
    if near is not None:
        others = (
            f" (or {', '.join(same[1:3])}{', …' if len(same) > 3 else ''})" if len(same) > 1 else ""
        )
        hint: str | None = f"did you mean {near}?{others}"
    else:
        words, roles = argument_words(resolved.written), list(resolved.recipe.models)
        hint = suggest_key(last, SECTIONS, words, roles=roles)[1]
    return UsageError(f"the recipe has no key {key}", hint=hint, code="R42")
