"""Checks of what happens to weights after a call."""

from __future__ import annotations

from collections.abc import Iterable

from rlcli.recipe.components import argument_of, declared_mapping
from rlcli.recipe.parsing.tree import KeyPath, dotted
from rlcli.recipe.schema import Call, Hooks, Role
from rlcli.recipe.validation.semantics.models import sources
from rlcli.recipe.validation.semantics.notes import Notes


def roles_and_methods(calls: Iterable[str]) -> list[KeyPath]:
    """The values that say which roles some calls of the graph are of, and what they do."""
    return [("graph", name, key) for name in calls for key in ("model", "call")]


def check_hooks(notes: Notes, call: Call, path: KeyPath) -> None:
    """Weights are copied between roles with the same parameters, to one that is not trained."""
    source, target = notes.recipe.models.get(call.model), call.hooks.copy_to
    if source is not None and not source.has_weights:
        _source_without_weights(notes, call, path)
    elif target is not None:
        _target_of_copies(notes, call, source, target, path)
        _training_after_copy(notes, call, target, path)
    else:
        _copies_without_target(notes, call, path)


def _copies_without_target(notes: Notes, call: Call, path: KeyPath) -> None:
    defaults, hooks = Hooks(), (*path, "hooks")
    for key in ("eta", "transfer"):
        if getattr(call.hooks, key) != getattr(defaults, key):
            setting, target = dotted((*hooks, key)), dotted((*hooks, "copy_to"))
            message = f"{setting} has no effect without copy_to"
            hint = f"set {target} to the role that follows {call.model}, or leave it out"
            needs = [(*hooks, key), (*hooks, "copy_to")]
            notes.note("R49", message, (*hooks, key), hint, needs=needs)


def _source_without_weights(notes: Notes, call: Call, path: KeyPath) -> None:
    for key, verb in (("copy_to", "copy"), ("offload", "offload")):
        if getattr(call.hooks, key):
            message = f"{call.model} has no weights to {verb}"
            needs = [*sources(call.model), (*path, "model")]
            notes.note("R71", message, (*path, "hooks", key), needs=needs)


def _target_of_copies(
    notes: Notes, call: Call, source: Role | None, target: str, path: KeyPath
) -> None:
    recipe, hook = notes.recipe, (*path, "hooks", "copy_to")
    role = recipe.models.get(target)
    if role is None:
        notes.unknown("role", target, ("models",), hook)
    elif target == call.model or target in recipe.trained_roles:
        message = f"{target} is trained itself and cannot follow {call.model}"
        notes.note("R71", message, hook, needs=roles_and_methods(recipe.graph))
    elif not role.has_weights:
        message = f"{target} has no weights and cannot follow {call.model}"
        notes.note("R71", message, hook, needs=sources(target))
    elif source is not None and role.head != source.head:
        _different_heads(notes, call.model, target, hook)
    elif call.hooks.eta < 1:
        _moving_average(notes, target, call, path)
        _transfer_of_average(notes, target, call, path)


def _training_after_copy(notes: Notes, call: Call, target: str, path: KeyPath) -> None:
    """A role that follows another one has all that a step trains, or it would sample with the
    weights of half a step."""
    graph = notes.recipe.graph
    updates = [
        name
        for name in graph
        if (graph[name].model, graph[name].call) == (call.model, "train_step")
    ]
    copying = [name for name in updates if graph[name].hooks.copy_to == target]
    if copying and path == ("graph", copying[-1]) and copying[-1] != updates[-1]:
        message = f"{target} would lack what {updates[-1]} trains: {copying[-1]} copies before it"
        hooks, needs = (*path, "hooks"), roles_and_methods(updates)
        hint = f"move {dotted(hooks)} to {dotted(('graph', updates[-1]))}"
        notes.note("R71", message, (*hooks, "copy_to"), hint, needs=needs)


def _different_heads(notes: Notes, source: str, target: str, hook: KeyPath) -> None:
    models = notes.recipe.models
    message = (
        f"{source} has the head {models[source].head}, but {target}, which follows it, "
        f"has the head {models[target].head}"
    )
    heads = [("models", name, "head") for name in (source, target)]
    is_of_rollout = notes.mark(hook).is_default
    where = heads[0] if is_of_rollout else hook
    notes.note_once(("head", source), "R71", message, where, None, heads)


def _transfer_of_average(notes: Notes, target: str, call: Call, path: KeyPath) -> None:
    """A target that mixes weights does not hold what was sent last, so every copy must be
    complete."""
    if call.hooks.transfer == "delta":
        setting = (*path, "hooks", "transfer")
        message = f"{target} mixes weights with eta {call.hooks.eta:g}, so a delta would not fit"
        hint = f"use {dotted(setting)}=full"
        notes.note("R49", message, setting, hint, needs=[setting, (*path, "hooks", "eta")])


def _moving_average(notes: Notes, target: str, call: Call, path: KeyPath) -> None:
    """A moving average needs weights that small updates change."""
    backend = notes.recipe.models[target].engine
    for name, rounded in declared_mapping("backends", backend.type, "ROUNDS_WEIGHTS").items():
        value = argument_of("backends", backend, name)
        if value in rounded:
            setting = ("models", target, "backend", "args", name)
            eta = f"eta {call.hooks.eta:g}"
            message = (
                f"{target} holds its weights in {value}, in which an average with "
                f"{eta} would never move"
            )
            hint = f"use {dotted(setting)}=auto, which holds them in float32"
            notes.note("R49", message, setting, hint, needs=[setting, (*path, "hooks", "eta")])
