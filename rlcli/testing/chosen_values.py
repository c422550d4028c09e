"""Values for arguments that have no default, so that a component can be tested although nobody has
given any: such as its types and LIMITS allow, whatever they mean."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import StrictBool, StrictFloat, StrictInt, ValidationError

from rlcli import registry
from rlcli.registry import Argument, Signature
from rlcli.registry.arguments import arguments_model, members_of, type_of_argument
from rlcli.testing.subjects import COMPONENTS, Subject

CHOSEN_FOR = ("interface", "reward", "dataset", "environment")
"""Kinds of components that need nothing but their arguments."""
USUAL = (False, 0.5, 2, 1, 1.0, 8, 100, 0, 0.0, -1, -1.0)
"""Tried in this order, after the values of a `Literal`."""


def chosen_values(subject: Subject, present: Mapping[str, Any]) -> dict[str, Any]:
    """Argument → a value for each that has no default and is not among those `present`.

    Empty if one of them is no number, switch or choice, or if the component states EXAMPLES, which
    hold for values that only its author knows.
    """
    if subject.kind not in CHOSEN_FOR:
        return {}
    described = registry.signature(COMPONENTS[subject.kind], subject.name)
    alternatives = described.constants.get("ONE_OF", ())
    needs_another = bool(alternatives) and present.keys().isdisjoint(alternatives)
    if needs_another or described.constants.get("EXAMPLES"):
        return {}
    lacking = [each for each in described.arguments if each.required and each.name not in present]
    values = {argument.name: _first_valid(described, argument) for argument in lacking}
    return {} if None in values.values() else values


def _first_valid(described: Signature, argument: Argument) -> Any:
    """None if there is no such value."""
    kinds = set(members_of(type_of_argument(argument))) - {NoneType}
    literals = [kind for kind in kinds if get_origin(kind) is Literal]
    if not kinds.difference(literals) <= {StrictBool, StrictInt, StrictFloat}:
        return None
    choices = [value for literal in literals for value in get_args(literal)]
    model = arguments_model(described.class_name, [argument], described.limits)
    for value in (*choices, *USUAL):
        try:
            model.model_validate({argument.name: value})
        except ValidationError:
            continue
        return value
    return None
