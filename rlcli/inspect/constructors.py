"""Errors that are only found by making a recipe's components."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcli import registry
from rlcli.api.config import ModelBackendAbstraction, ModelInterfaceAbstraction
from rlcli.errors import RlcliError
from rlcli.recipe.libraries import components_of

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved


def component_faults(resolved: Resolved) -> Iterator[RlcliError]:
    """Errors that interfaces and backends raise when they are made, about their arguments or what
    these name: some are found no other way. Imports their files, and thus torch; datasets are
    opened when they are read."""
    reported: set[str] = set()
    for path, kind, component in components_of(resolved.recipe):
        try:
            if kind == "interfaces":
                registry.make_interface(
                    ModelInterfaceAbstraction(component.type, component.args)
                ).check_ready()
            elif kind == "backends":
                registry.make_backend(ModelBackendAbstraction(component.type, component.args))
        except RlcliError as error:
            if error.what not in reported:
                reported.add(error.what)
                named = [word for word in re.findall(r"\w+", error.what) if word in component.args]
                location = resolved.origin((*path, "args", named[0]) if named else (*path, "type"))
                yield type(error)(
                    error.what, where=error.where or str(location), hint=error.hint, code=error.code
                )
