"""What a recipe's components require of this machine: optional libraries, which are not imported
here, and variables of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcli.errors import ResourceError
from rlcli.recipe.call_keys import calls_of
from rlcli.recipe.components import argument_of, declared, signature_of
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
    for path, kind, component in components_of(resolved.recipe):
        for argument in declared(kind, component.type, "VARIABLES") or ():
            variable = argument_of(kind, component.type, component.args, argument)
            if not isinstance(variable, str) or os.environ.get(variable):
                continue
            if (component.type, variable) not in reported:
                reported.add((component.type, variable))
                location = str(resolved.origin((*path, "args", argument)))
                text = f"{component.type}: the environment has no {variable}"
                yield ResourceError(text, where=location, hint=f"export {variable}=…", code="F51")


def libraries_to_install(resolved: Resolved) -> Iterator[ResourceError]:
    """An error for each, at the first place in the recipe that names a component requiring it."""
    reported: set[str] = set()
    for path, kind, component in components_of(resolved.recipe):
        for error in missing_libraries(signature_of(kind, component.type)):
            if error.what not in reported:
                location = str(resolved.origin((*path, "type")))
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


def components_of(recipe: Recipe) -> Iterator[tuple[KeyPath, str, Component]]:
    """(path, kind, section) of every named component."""
    for name, dataset in recipe.datasets.items():
        yield ("datasets", name), "datasets", dataset
    for name, role in recipe.models.items():
        if role.backend is not None:
            yield ("models", name, "backend"), "backends", role.backend
    for path, call in calls_of(recipe):
        yield (*path, "interface"), "interfaces", call.interface
