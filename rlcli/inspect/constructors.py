"""Errors that are only found by making a recipe's components."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rlcli import registry
from rlcli.api.config import (
    EnvironmentAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
)
from rlcli.errors import RlcliError, UsageError
from rlcli.project import is_built_in
from rlcli.recipe.components import signature_of
from rlcli.recipe.requirements_here import components_of
from rlcli.registry.requirements import missing_libraries

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Component

MAKING = {"__init__", "__new__", "__post_init__", "check_ready"}
"""Methods of a class that may refuse its arguments."""


def component_faults(resolved: Resolved) -> Iterator[RlcliError]:
    """Errors that interfaces, backends and built-in environments raise when they are made, about
    their arguments or what these name: some are found no other way. Datasets are opened when they
    are read, and environments of a project may do anything.

    A component that only compares its arguments is not imported, because most import torch."""
    reported: set[str] = set()
    for named in components_of(resolved.recipe):
        args = named.component.args
        try:
            _check(named.kind, named.component)
        except RlcliError as error:
            if error.what not in reported:
                reported.add(error.what)
                words = [word for word in re.findall(r"\w+", error.what) if word in args]
                path = (*named.args_path, words[0]) if words else named.name_path
                location = resolved.origin(path)
                error.where = error.where or str(location)
                yield error


def _check(kind: str, component: Component) -> None:
    if kind == "datasets":
        return
    if kind == "environments":
        described = signature_of(kind, component.type)
        if is_built_in(described.path) and not any(missing_libraries(described)):
            registry.make_environment(EnvironmentAbstraction(component.type, component.args))
        return
    if _only_compares_arguments(kind, component.type):
        _compare_arguments(kind, component)
    elif kind == "interfaces":
        abstraction = ModelInterfaceAbstraction(component.type, component.args)
        registry.make_interface(abstraction).check_ready()
    else:
        registry.make_backend(ModelBackendAbstraction(component.type, component.args))


def _only_compares_arguments(kind: str, name: str) -> bool:
    """Whether making a component does no more than its `ARGUMENT_CHECK`: the file and attribute of
    a function, or None, of its class. Only built-in ones are trusted to be importable."""
    described = signature_of(kind, name)
    return is_built_in(described.path) and (
        "ARGUMENT_CHECK" in described.constants or MAKING.isdisjoint(described.methods)
    )


def _compare_arguments(kind: str, component: Component) -> None:
    check = registry.load_declared(kind, component.type, "ARGUMENT_CHECK")
    if check is None:
        return
    described = signature_of(kind, component.type)
    defaults = {argument.name: argument.default for argument in described.arguments}
    try:
        check(SimpleNamespace(**defaults | component.args))
    except ValueError as error:
        raise UsageError(f"{kind.removesuffix('s')} {component.type}: {error}") from error
