"""Bounds, choices, alternatives and requirements of arguments: declared once in a class, checked
with the recipe, and again when a component is created; alternatives only when its engine starts, so
that its class can be inspected without them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from inspect import signature
from typing import Any, Literal, get_args, get_origin

Limits = Mapping[str, Mapping[str, float]]
"""Argument → its bounds, any of `BOUNDS`. Written as a literal, because it is read without
importing the class: `LIMITS: ClassVar[Limits] = {"minibatches": {"ge": 1}, "discount": {"ge":
0, "le": 1}}`."""

Alternatives = tuple[str, ...]
"""Arguments of which a backend or an environment needs exactly one: `ONE_OF:
ClassVar[Alternatives] = ("python", "urls")`."""

Needs = Mapping[str, str]
"""Argument that is neither null nor its default, or `ARGUMENT=VALUE` → what it needs to make
sense: another argument that is set (not null, false or 0), or `ARGUMENT=VALUE`, with `|`
between several values; and what that one needs. `NEEDS: ClassVar[Needs] = {"group_adv_norm":
"adv_norm", "gamma": "loss=sigmoid|robust"}`."""

ArgumentCheck = str | None
"""The function that compares a component's arguments with each other, as `_file.function` of a
sibling file without torch; None if nothing is compared. It takes any object with the arguments as
attributes and raises ValueError. Its class calls it when it is made, and declares that it does
nothing else then that could fail: `ARGUMENT_CHECK: ClassVar[ArgumentCheck] = "_rules.of_mine"`.
`rlcli check` then needs to import neither the class nor torch."""

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def check_arguments(component: Any) -> None:
    """Compare a component's values with the `LIMITS` and `NEEDS` of its class and its bases, and
    with the named `Literal` types of its fields. Raises ValueError.

    None is always allowed: it stands for "off" or for a default.
    """
    _check_values(component)
    needs = needs_of(type(component))
    defaults = _defaults(component) if needs else {}
    for problem in unmet(needs, partial(getattr, component), defaults.get).values():
        raise ValueError(problem)


def _defaults(component: Any) -> dict[str, Any]:
    """Argument → its default."""
    arguments = signature(type(component)).parameters.values()
    factories = {
        field.name: field.default_factory
        for field in (fields(component) if is_dataclass(component) else ())
        if field.default_factory is not MISSING
    }
    return {each.name: each.default for each in arguments} | {
        name: make() for name, make in factories.items()
    }


def _check_values(component: Any) -> None:
    """Each by itself."""
    limits, choices = _declared(type(component))
    for name, bounds in limits.items():
        value = getattr(component, name)
        is_number = isinstance(value, int | float)  # or a text such as "auto"
        if is_number and not all(_holds(value, *bound) for bound in bounds.items()):
            words = " and ".join(f"{BOUNDS[kind]} {bound}" for kind, bound in bounds.items())
            raise ValueError(f"{name} is {value}; it must be {words}")
    for name, allowed in choices.items():
        value = getattr(component, name)
        if value is not None and value not in allowed:
            raise ValueError(
                f"{name} is {value!r}; it must be one of {', '.join(map(str, allowed))}"
            )


def unmet(
    needs: Needs, value_of: Callable[[str], Any], default_of: Callable[[str], Any]
) -> dict[tuple[str, str], str]:
    """(argument, the other that it needs) → what is wrong, for each need that is not met."""
    problems: dict[tuple[str, str], str] = {}
    for condition, need in needs.items():
        (argument, names_value, _), needed = condition.partition("="), need.partition("=")[0]
        applies = (
            _is_met(condition, value_of)
            if names_value
            else value_of(argument) not in (None, default_of(argument))
        )
        if applies and _is_met(need, value_of) and value_of(needed) == default_of(needed):
            need = needs.get(needed, need)  # which a default leaves unreported
            needed = need.partition("=")[0]
        if applies and not _is_met(need, value_of):
            problems[argument, needed] = f"{condition} needs {need}; {needed} is {value_of(needed)}"
    return problems


def _is_met(condition: str, value_of: Callable[[str], Any]) -> bool:
    name, sign, values = condition.partition("=")
    return str(value_of(name)) in values.split("|") if sign else bool(value_of(name))


def alternatives_problem(alternatives: Alternatives, values: Mapping[str, Any]) -> str | None:
    """What is wrong with the values of arguments of which exactly one is needed."""
    if not alternatives or sum(bool(values.get(name)) for name in alternatives) == 1:
        return None
    named = [name for name in alternatives if values.get(name)]
    return (
        f"{' and '.join(named)} are given; keep one"
        if named
        else f"{' or '.join(alternatives)} is needed"
    )


def needs_of(cls: type) -> dict[str, str]:
    """`NEEDS` of a class and its bases."""
    needs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        needs |= vars(base).get("NEEDS", {})
    return needs


def _declared(cls: type) -> tuple[Limits, Mapping[str, tuple[Any, ...]]]:
    """`LIMITS` of a class and its bases, and the values that the types of their fields name."""
    limits: dict[str, Mapping[str, float]] = {}
    choices: dict[str, tuple[Any, ...]] = {}
    for base in reversed(cls.__mro__):
        limits |= vars(base).get("LIMITS", {})
        module = sys.modules.get(base.__module__)  # a script that is executed may have none
        names = vars(module) if module is not None else {}
        for field, annotation in vars(base).get("__annotations__", {}).items():
            named = names.get(str(annotation).removesuffix(" | None"))
            choices |= {field: get_args(named)} if get_origin(named) is Literal else {}
    return limits, choices


def _holds(value: float, kind: str, bound: float) -> bool:
    return {"ge": value >= bound, "gt": value > bound, "le": value <= bound, "lt": value < bound}[
        kind
    ]
