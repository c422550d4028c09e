"""Everything about a value: its default, each layer that sets it, and where references carry it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlcli.errors import UsageError
from rlcli.recipe.changes_on_resume import Kind, follows_length, kind_of_change
from rlcli.recipe.expansion.rollouts import as_role
from rlcli.recipe.introspection.fields import Field, completed, field_of, yaml_word
from rlcli.recipe.parsing.interpolation import Reference, interpolate, references_in
from rlcli.recipe.parsing.places import covers
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.removal import place_of, removed_at
from rlcli.recipe.parsing.tree import (
    DEFAULT,
    KeyPath,
    MappingNode,
    Mark,
    Node,
    Scalar,
    at,
    dotted,
    is_within,
    leaves,
    plain,
    plain_leaves,
)
from rlcli.recipe.resolve import Resolved, Setting
from rlcli.recipe.schema import SECTIONS, Recipe
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
    value_there: str | None = None
    """That of the key, if it is another one: components have defaults of their own."""


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
    below = [candidate for candidate in values if is_within(candidate, path)]
    if below:
        return [_leaf(resolved, leaf, values[leaf]) for leaf in below]
    removed = _removed_around(resolved.written, path)
    if removed is None or not resolved.history(path):
        raise _unknown(resolved, key, values)
    return _explanation_of_removed(resolved, path, removed)


def _leaf(resolved: Resolved, path: KeyPath, value: Any) -> Leaf:
    node = _effective(resolved, path)
    return Leaf(dotted(path), value, str(node.mark) if node else DEFAULT)


def _removed_around(written: MappingNode, path: KeyPath) -> Mark | None:
    """Where a null removes a key, or a section around it."""
    for depth in range(1, len(path) + 1):
        mark = removed_at(written, path[:depth])
        if mark is not None:
            return mark
    return None


def known_values(resolved: Resolved) -> dict[KeyPath, Any]:
    """Every key that can be set and its value: the schema's, those of each component's arguments,
    and those of the recipe's own blocks."""
    values = dict(plain_leaves(completed(resolved.to_json())))
    values |= {path: plain(node) for path, node in leaves(_blocks(resolved)) if path}
    for reference in references_in(resolved.written):
        if reference.is_alone and reference.target[0] not in SECTIONS:
            _complete_block(values, reference, resolved.written)
    return {
        path: value
        for path, value in values.items()
        if not (value == {} and _is_prefix(path, values))
    }


def _complete_block(values: dict[KeyPath, Any], reference: Reference, written: MappingNode) -> None:
    """Add to the values of a block those that the key which refers to it has, such as defaults,
    without what is set there, on top of the block."""
    depth = len(reference.path)
    for path in [path for path in values if is_within(path, reference.path)]:
        is_set_on_top = path != reference.path and at(written, path) is not None
        key = (*reference.target, *path[depth:])
        if not is_set_on_top and values.get(key) is None:  # null may restore a default
            values[key] = values[path]


def _effective(resolved: Resolved, path: KeyPath) -> Node | None:
    """The effective value as some layer sets it, also for keys of blocks."""
    return at(resolved.tree if path[0] in SECTIONS else _blocks(resolved), path)


def _is_prefix(path: KeyPath, values: dict[KeyPath, Any]) -> bool:
    return any(is_within(longer, path) and longer != path for longer in values)


def _blocks(resolved: Resolved) -> MappingNode:
    """The recipe's own blocks, resolved."""
    return interpolate(resolved.written, Problems(), os.environ).without_keys(SECTIONS)


# -- one value -------------------------------------------------------------------------------------


def _explanation(resolved: Resolved, path: KeyPath, values: dict[KeyPath, Any]) -> Explanation:
    is_of_schema = path[0] in SECTIONS
    carried = {
        use: through
        for use, through in _uses(resolved.written, path).items()
        if use[0] in SECTIONS and ("args" not in use or use in values)
    }
    affected = [path, *carried] if is_of_schema else [*carried]
    field = field_of(next(iter(affected), path), resolved.tree)
    itself = [Use(dotted(path))] if is_of_schema and _is_read(path) else []
    return Explanation(
        key=dotted(path),
        value=values[path],
        field=field,
        steps=tuple(_steps(resolved, path, field, values[path])),
        uses=(
            *itself,
            *(
                Use(dotted(use), through, _another(values, use, values[path]))
                for use, through in carried.items()
            ),
        ),
        topology=_effect(affected),
        on_resume=_effect_on_resume(resolved.recipe, affected),
    )


def _another(values: Mapping[KeyPath, Any], path: KeyPath, value: Any) -> str | None:
    """The value at a path, if there is one and it is not the given one."""
    return yaml_word(values[path]) if path in values and values[path] != value else None


def _explanation_of_removed(resolved: Resolved, path: KeyPath, removed: Mark) -> Explanation:
    """That of a key which a null removes: whatever set it before, the null wins."""
    explanation = _explanation(resolved, path, {path: None})
    *earlier, last = (replace(step, wins=False) for step in explanation.steps)
    steps = (*earlier, replace(last, wins=True))
    return replace(explanation, steps=steps, uses=(), removed=place_of(removed))


def _steps(
    resolved: Resolved, path: KeyPath, field: Field | None, value: Any
) -> Iterator[ValueStep]:
    node = _effective(resolved, path)
    history = resolved.history(path)
    winner = _winner(history, node, value)
    default = _declared_default(field)
    if node is not None and node.mark.is_default:
        if history and history[-1].value is not None:
            winner = len(history) - 1  # a reference to something unset: it brings a default
        else:
            default = _derived_default(node, path, field)
    if default is not None:
        text, note = default
        yield ValueStep(DEFAULT, text, note, wins=winner is None)
    written = _texts(resolved)
    for index, setting in enumerate(history):
        text = written.get(setting.mark) or yaml_word(setting.value).replace("$${", "${")
        yield ValueStep(str(setting.mark), text, _note(setting), wins=index == winner)


def _winner(history: Sequence[Setting], node: Node | None, value: Any) -> int | None:
    """Which setting decides a value; None if the default does, which a null may restore."""
    if node is None:
        return None
    deciding = [index for index, setting in enumerate(history) if setting.mark == node.mark]
    if not deciding or (history[deciding[-1]].value is None and value is not None):
        return None
    return deciding[-1]


def _declared_default(field: Field | None) -> tuple[str, str | None] | None:
    """A field's default, and where it is declared."""
    if field is None or field.default_text is None:
        return None
    return field.default_text, field.location


def _derived_default(node: Node, path: KeyPath, field: Field | None) -> tuple[str, str | None]:
    """A value that no layer wrote, and what chose it."""
    location = field.location if field is not None else None
    note = "chosen by rlcli" if path[-1] == "type" else location
    if node.mark.file != DEFAULT:
        note = node.mark.file.removeprefix(f"{DEFAULT}, ")
    return yaml_word(plain(node)), note


def _texts(resolved: Resolved) -> dict[Mark, str]:
    """The values that layers set, as written."""
    return {
        node.mark: node.text
        for tree in resolved.trees
        for _, node in leaves(tree)
        if isinstance(node, Scalar) and node.text
    }


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


def _effect_on_resume(recipe: Recipe, paths: list[KeyPath]) -> Kind:
    """What the most serious of the changes of some keys does to a half-finished run."""
    kinds = [kind_of_change(path, recipe, follows_length(recipe)) for path in paths]
    return max(kinds, key=list(Kind).index, default=Kind.SAFE)


def _unknown(resolved: Resolved, key: str, values: dict[KeyPath, Any]) -> UsageError:
    """Likely intended keys: the same last word elsewhere, a similar key,
    or another framework's word."""
    keys = [dotted(path) for path in values]
    sections = sorted({dotted(path[:depth]) for path in values for depth in range(1, len(path))})
    same = _namesakes(key, keys, sections)
    near = same[0] if same else nearest_name(key, [*keys, *sections])
    around = [section for section in sections if key.startswith(f"{section}.")]
    if near is not None and near not in around:
        hint: str | None = f"did you mean {near}?{_or_others(same[1:])}"
    elif around:
        hint = _hint_within(around[-1], key, keys, resolved)
    else:
        hint = _hint(resolved, key.rpartition(".")[2], SECTIONS)
    return UsageError(f"the recipe has no key {key}", hint=hint, code="R42")


def _hint_within(section: str, key: str, keys: Sequence[str], resolved: Resolved) -> str | None:
    """What a section has instead of a key."""
    inside = [name.removeprefix(f"{section}.") for name in keys if name.startswith(f"{section}.")]
    first, *_ = key.removeprefix(f"{section}.").split(".")
    legal = dict.fromkeys(name.split(".")[0] for name in inside)
    return _hint(resolved, first, legal, section.split("."))


def _hint(
    resolved: Resolved, key: str, legal: Iterable[str], above: Sequence[str] = ()
) -> str | None:
    """What `rlcli train` says of an unknown key."""
    words, roles = argument_words(resolved.written), list(resolved.recipe.models)
    return suggest_key(key, legal, words, above, roles)[1]


def _or_others(others: list[str]) -> str:
    """The first two of the others that a key may mean."""
    ending = ", …" if len(others) > 2 else ""
    return f" (or {', '.join(others[:2])}{ending})" if others else ""


def _namesakes(key: str, keys: Sequence[str], sections: Sequence[str]) -> list[str]:
    """The keys with the same last word or, if there are none, the sections with it, or the keys of
    which it is a part. The block that feeds all comes first."""
    last = key.rpartition(".")[2]
    same = [candidate for candidate in keys if candidate.rpartition(".")[2] == last]
    same = same or [section for section in sections if section.endswith(f".{key}")]
    same = same or [candidate for candidate in keys if last in re.split(r"[._]", candidate)]
    return sorted(same, key=lambda name: (name.split(".")[0] in SECTIONS, name.count(".")))
