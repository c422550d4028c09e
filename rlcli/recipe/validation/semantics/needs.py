"""Checks what the arguments of a component need to make sense, as its class declares in `NEEDS`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rlcli.api.limits import unmet
from rlcli.recipe.call_keys import calls_of
from rlcli.recipe.components import argument_of, known_signature
from rlcli.recipe.parsing.tree import KeyPath
from rlcli.recipe.schema import Component
from rlcli.recipe.validation.semantics.notes import Notes


def check(notes: Notes) -> None:
    for kind, component, path in _components(notes):
        _needs(notes, kind, component, (*path, "args"))


def _components(notes: Notes) -> Iterator[tuple[str, Component, KeyPath]]:
    for path, call in calls_of(notes.recipe):
        yield "interfaces", call.interface, (*path, "interface")
    for name, role in notes.recipe.models.items():
        if role.backend is not None:
            yield "backends", role.backend, ("models", name, "backend")
    for name, dataset in notes.recipe.datasets.items():
        yield "datasets", dataset, ("datasets", name)


def _needs(notes: Notes, kind: str, component: Component, args: KeyPath) -> None:
    signature = known_signature(kind, component.type)
    needs = signature.needs if signature is not None else {}
    value_of = partial(argument_of, kind, component.type, component.args)
    default_of = partial(argument_of, kind, component.type, {})
    problems = unmet(needs, value_of, default_of)
    for (argument, needed), problem in problems.items():
        places: list[KeyPath] = [(*args, argument), (*args, needed)]
        written = f" ({notes.mark(places[1])})" if notes.is_set(places[1]) else ""
        message = f"{problem}{written}"
        notes.note("R71", message, notes.first_set(*places), needs=places, same=problem)
