"""The backends that roles have where no layer of a recipe names one."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from rlcli.api import default_backends
from rlcli.recipe.parsing.tree import (
    Entry,
    KeyPath,
    MappingNode,
    at,
    default_mark,
    entries_at,
    is_null,
    keys_at,
    node_of,
    plain,
    with_entry,
)
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.schema import WEIGHTS, Call, Role


def with_backends(tree: MappingNode, unresolved: Unresolved | None = None) -> MappingNode:
    """Give every role without a backend in any layer its default one;
    a doubtful guess is recorded."""
    for name in keys_at(tree, ("models",)):
        role, rollout = at(tree, ("models", name)), at(tree, ("models", name, "rollout"))
        if isinstance(role, MappingNode) and _names_no_backend(role):
            kind = _default_backend(tree, name, role)
            if unresolved is not None and not _is_sure(tree, name, role, kind, unresolved):
                unresolved.values.add(("models", name, "backend", "type"))
            tree = _with_backend(tree, ("models", name, "backend"), kind)
        if isinstance(rollout, MappingNode) and _names_no_backend(rollout):
            tree = _with_backend(
                tree, ("models", name, "rollout", "backend"), default_backends.UNTRAINED
            )
    return tree


def _with_backend(tree: MappingNode, path: KeyPath, kind: str) -> MappingNode:
    node, mark = at(tree, path), default_mark()
    backend = node if isinstance(node, MappingNode) else MappingNode({}, mark)
    typed = {"type": Entry(mark, node_of(kind, mark))}
    return with_entry(
        tree, path, Entry(backend.mark, replace(backend, entries={**typed, **backend.entries}))
    )


def _names_no_backend(section: MappingNode) -> bool:
    node = section.get("backend")
    if isinstance(node, MappingNode):
        return "type" not in node.entries
    return node is None or is_null(node)


def _default_backend(tree: MappingNode, name: str, role: MappingNode) -> str:
    weights = (role.get(key) for key in WEIGHTS)
    is_set_up = bool(entries_at(role, ("backend", "args")))
    if not is_set_up and all(node is None or is_null(node) for node in weights):
        return default_backends.WEIGHTLESS
    calls = [plain(entry.node) for entry in entries_at(tree, ("graph",)).values()]
    trains = [
        call.get("model")
        for call in calls
        if isinstance(call, dict) and call.get("call") == "train_step"
    ]
    return default_backends.TRAINED if name in trains else default_backends.UNTRAINED


def _is_sure(
    tree: MappingNode, name: str, role: MappingNode, guess: str, unresolved: Unresolved
) -> bool:
    """Whether everything that the guess of a role's backend depends on was understood."""
    if guess == default_backends.WEIGHTLESS:
        misspelt = any(key not in Role.model_fields for key in role.entries)
        return not misspelt and not any(
            unresolved.about_part(("models", name, key)) for key in WEIGHTS
        )
    if guess == default_backends.TRAINED:
        return True
    graph, models = tree.get("graph"), tree.get("models")
    if not isinstance(graph, MappingNode) or not isinstance(models, MappingNode):
        return False
    calls = [call for call in plain(graph).values() if isinstance(call, dict)]
    legal = get_args(Call.model_fields["call"].annotation)
    # a misspelt role may stand for any
    knows = all(str(call.get("model")) in models.entries for call in calls)
    return knows and all(call.get("call") in legal for call in calls if call.get("model") == name)
