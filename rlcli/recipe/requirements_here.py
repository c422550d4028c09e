"""What a recipe's components require of this machine: optional libraries, which are not imported
here, and variables of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.errors import ResourceError
from rlcli.recipe.components import argument_of, declared, signature_of
from rlcli.recipe.graph import calls_of
from rlcli.registry.requirements import missing_libraries, missing_of, read_requirements

if TYPE_CHECKING:
    from rlcli.recipe.parsing.tree import KeyPath
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Component, Recipe


def missing_here(resolved: Resolved) -> Iterator[ResourceError]:
    """An error for each library that is not installed, and for each variable that is not set."""
    yield from libraries_to_install(resolved)
    yield from trackers_to_install(resolved)
    yield from variables_to_set(resolved)


def variables_to_set(resolved: Resolved) -> Iterator[ResourceError]:
    """An error for each variable that an argument named in a component's `VARIABLES` names,
    at the first place."""
    reported: set[tuple[str, str]] = set()
    for named in components_of(resolved.recipe):
        component = named.component
        for argument in declared(named.kind, component.type, "VARIABLES") or ():
            variable = argument_of(named.kind, component, argument)
            if not isinstance(variable, str) or os.environ.get(variable):
                continue
            if (component.type, variable) not in reported:
                reported.add((component.type, variable))
                location = str(resolved.origin((*named.args_path, argument)))
                text = f"{component.type}: the environment has no {variable}"
                yield ResourceError(text, where=location, hint=f"export {variable}=…", code="F51")


def libraries_to_install(resolved: Resolved) -> Iterator[ResourceError]:
    """An error for each, at the first place in the recipe that names a component requiring it."""
    reported: set[str] = set()
    for named in components_of(resolved.recipe):
        for error in missing_libraries(signature_of(named.kind, named.component.type)):
            if error.what not in reported:
                location = str(resolved.origin(named.name_path))
                yield ResourceError(error.what, where=location, hint=error.hint, code=error.code)
            reported.add(error.what)


def trackers_to_install(resolved: Resolved) -> Iterator[ResourceError]:
    """An error for each library of a tracker that is not installed."""
    for number, tracker in enumerate(resolved.recipe.log.trackers):
        location = str(resolved.origin(("log", "trackers", number)))
        for error in missing_for_tracker(tracker):
            yield ResourceError(error.what, where=location, hint=error.hint, code=error.code)


def missing_for_tracker(tracker: str) -> Iterator[ResourceError]:
    """An error for each library of a tracker that is not installed. The extra with a tracker's
    libraries has its name; what TensorBoard needs is always there."""
    if tracker != "tensorboard":
        yield from missing_of(f"tracker {tracker}", read_requirements().extras[tracker])


@dataclass(frozen=True)
class NamedComponent:
    """A component that a recipe names."""

    kind: str
    component: Component
    name_path: KeyPath
    """Where its name is."""
    args_path: KeyPath
    """Where its arguments are."""


def components_of(recipe: Recipe) -> Iterator[NamedComponent]:
    """All that a recipe names."""
    for name, dataset in recipe.datasets.items():
        yield _section("datasets", dataset, ("datasets", name))
    for name, role in recipe.models.items():
        if role.backend is not None:
            yield _section("backends", role.backend, ("models", name, "backend"))
    for path, call in calls_of(recipe):
        yield _section("interfaces", call.interface, (*path, "interface"))
        yield from _environment(call.interface, (*path, "interface", "args"))


def _section(kind: str, component: Component, path: KeyPath) -> NamedComponent:
    return NamedComponent(kind, component, (*path, "type"), (*path, "args"))


def _environment(interface: Component, path: KeyPath) -> Iterator[NamedComponent]:
    """The environment that an interface plays with, if it does."""
    arguments = declared("interfaces", interface.type, "ENVIRONMENT")
    if arguments:
        name, args = arguments["name"], arguments["args"]
        values = interface.args.get(args) or {}
        environment = type(interface)(type=interface.args[name], args=values)
        yield NamedComponent("environments", environment, (*path, name), (*path, args))
