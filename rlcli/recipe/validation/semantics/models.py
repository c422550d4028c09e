"""Checks that each role has a single source of weights, and that roles do not start from each other
in a cycle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcli.api.default_backends import WEIGHTLESS
from rlcli.api.limits import alternatives_problem
from rlcli.recipe.components import declared
from rlcli.recipe.graph import calls_of
from rlcli.recipe.parsing.places import GRAPHS
from rlcli.recipe.parsing.removal import place_of, removed_calls
from rlcli.recipe.parsing.tree import COMMAND_LINE, KeyPath, Mark, Scalar, dotted
from rlcli.recipe.schema import WEIGHTS, Role
from rlcli.recipe.validation.semantics.notes import Notes
from rlcli.spelling import name_instead


def check(notes: Notes) -> None:
    unused = unused_roles(notes)
    for name, role in notes.recipe.models.items():
        if name not in unused:
            _weights(notes, role, ("models", name))
            _alternatives(notes, role, ("models", name, "backend"))
    _circles(notes)
    _not_in_use(notes, unused)


def sources(role: str) -> list[KeyPath]:
    """The keys that determine where a role's weights come from, and whether it has any."""
    return [*(("models", role, source) for source in WEIGHTS), ("models", role, "backend", "type")]


def _weights(notes: Notes, role: Role, path: KeyPath) -> None:
    sources_set = [key for key in WEIGHTS if getattr(role, key) is not None]
    _number_of_sources(notes, role, path, sources_set)
    if role.init is not None and role.init not in {*notes.recipe.models, *notes.removed}:
        notes.unknown("role", role.init, ("models",), (*path, "init"))
    if role.scratch is not None and len(sources_set) == 1:
        _scratch(notes, role.scratch, role.tokenizer, path)
    if role.path is not None and role.warm_start is not None and not all(role.warm_start):
        message = f"{role.path!r} does not say which role of which recipe"
        notes.note("R45", message, (*path, "path"), "write recipe:<name or path>#<role>")


def _number_of_sources(notes: Notes, role: Role, path: KeyPath, sources_set: list[str]) -> None:
    """One source, unless the backend runs no model: then none."""
    kind = role.engine.type
    has = f"{dotted(path)} has"
    if len(sources_set) > 1:
        places = ", ".join(f"{key} at {notes.mark((*path, key))}" for key in sources_set)
        message = f"{has} {' and '.join(sources_set)}; keep one ({places})"
        notes.note("R47", message, (*path, sources_set[-1]), _to_keep_one(notes, path, sources_set))
    runs_model = declared("backends", kind, "RUNS_MODEL") is not False
    if not sources_set and runs_model:
        _without_source(notes, path)
    if sources_set and not runs_model:
        message = f"{has} {sources_set[0]}, but its backend `{kind}` runs no model"
        notes.note("R47", message, (*path, "backend", "type"), "drop one of the two")


def _to_keep_one(notes: Notes, path: KeyPath, sources_set: list[str]) -> str:
    """How to keep the source of the uppermost layer, which is the one meant."""
    uppermost = sources_set[0]
    for key in sources_set[1:]:
        if notes.problems.is_below(notes.mark((*path, uppermost)), notes.mark((*path, key))):
            uppermost = key
    others = [f"{dotted((*path, key))}=null" for key in sources_set if key != uppermost]
    return f"to keep {uppermost}: {' '.join(others)}"


def _without_source(notes: Notes, path: KeyPath) -> None:
    message = f"{dotted(path)} has no weights: give one of path, init, scratch"
    hint = (
        "the model to train is given by --model; a role that needs no weights has "
        f"`backend: {WEIGHTLESS}`"
    )
    notes.note("R39", message, path, hint, needs=sources(str(path[-1])))


def _scratch(
    notes: Notes, scratch: Mapping[str, Any], tokenizer: str | None, path: KeyPath
) -> None:
    where = (*path, "scratch")
    if not isinstance(scratch.get("model_type"), str):
        notes.note("R39", f"{dotted(where)}.model_type is required", where, needs=[where])
    if tokenizer is None:
        message = f"{dotted(path)}.tokenizer is required with scratch"
        notes.note("R39", message, path, needs=[(*path, "tokenizer")])


def _alternatives(notes: Notes, role: Role, path: KeyPath) -> None:
    """A backend whose class declares ONE_OF needs exactly one of these arguments."""
    backend = role.engine
    alternatives = declared("backends", backend.type, "ONE_OF") or ()
    if problem := alternatives_problem(alternatives, backend.args):
        key = notes.written(path)
        message = f"{dotted(key)} ({backend.type}): {problem}"
        hint = " or ".join(f"{dotted(key)}.args.{name}=…" for name in alternatives)
        needs = [(*path, "args", name) for name in alternatives]
        notes.note(
            "R39",
            message,
            (*path, "type"),
            f"{hint}; rlcli show backend {backend.type}",
            needs=needs,
        )


def _circles(notes: Notes) -> None:
    models = notes.recipe.models
    reported: set[str] = set()
    for start in models:
        walked: list[str] = []
        name: str | None = start
        while name in models and name not in walked:
            walked.append(name)
            name = models[name].init
        if name in walked and not reported & set(walked):
            circle = [*walked[walked.index(name) :], name]
            reported |= set(walked)
            notes.note(
                "R47",
                "the roles start from each other: " + " → ".join(circle),
                ("models", name, "init"),
            )


def unused_roles(notes: Notes) -> list[str]:
    """The roles that no call uses and no role starts from, if that is certain."""
    calls = dict(calls_of(notes.recipe))
    used = {call.model for call in calls.values()}
    used |= {role.init for role in notes.recipe.models.values() if role.init is not None}
    if used - {*notes.recipe.models} or any(notes.unresolved.about_entries(p) for p in GRAPHS):
        return []  # one of them may have been intended
    deciding: list[KeyPath] = [("models", name, "init") for name in notes.recipe.models]
    deciding += [(*path, "model") for path in calls]
    if any(map(notes.is_doubtful, deciding)):
        return []
    return [name for name in notes.recipe.models if name not in used]


def _not_in_use(notes: Notes, unused: list[str]) -> None:
    removed = _removed_calls(notes)
    for name in unused:
        message, path = f"no call uses the role {name}", ("models", name)
        hint: str | None = f"models.{name}=null removes it"
        if name in removed:
            call, mark = removed[name]
            if call in notes.missed:
                continue  # that is to be decided first
            message = f"{message}: {call} is removed {place_of(mark)}"
            hint = f"{hint} too"
        elif notes.mark(path).file == COMMAND_LINE:
            notes.problems.withdraw(path)
            notes.unresolved.values.add(("models", name, "mesh"))
            hint = name_instead(name, [role for role in notes.recipe.models if role != name])
        notes.note("R71", message, path, hint)


def _removed_calls(notes: Notes) -> dict[str, tuple[str, Mark]]:
    """Role → which of its calls a null removes, and where."""
    removals: dict[str, tuple[str, Mark]] = {}
    for path in GRAPHS:
        for name, call, mark in removed_calls(notes.problems.written, path):
            role = call.get("model")
            if isinstance(role, Scalar):
                removals.setdefault(str(role.value), (name, mark))
    return removals
