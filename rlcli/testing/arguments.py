"""The arguments of a component that a recipe may set, and other values for each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from rlcli.testing.class_source import attributes_read
from rlcli.testing.contract import Violation, place_of

Changes = Mapping[str, Any]
"""VariedArgument → its value, where it is not the default."""

FACTORS = (3, 1 / 3)
NUMBERS = (2, 0.5, 1, 0, 0.1, 5, 30, -1, 1000)
"""Tried after the default times FACTORS: small ones cross thresholds on short sequences, too."""


@dataclasses.dataclass(frozen=True)
class VariedArgument:
    """A field of a component that a recipe may set, with what else may stand in its place."""

    name: str
    default: Any
    others: tuple[Any, ...]
    """Other values, the first the likeliest to show a difference; empty for texts, whose meaning is
    unknown here."""
    may_be_text: bool = False

    @property
    def is_choice(self) -> bool:
        """Whether all of its values are known, so that any two of them must differ."""
        return all(isinstance(value, str | bool) for value in (self.default, *self.others))


def arguments_of(component: Any) -> list[VariedArgument]:
    """The arguments of a component, a dataclass, with the values that it has as defaults; a list or
    mapping of numbers is an argument for each of them."""
    if not dataclasses.is_dataclass(component):
        return []
    hints = get_type_hints(type(component))
    arguments: list[VariedArgument] = []
    for field in dataclasses.fields(component):
        if field.init:
            value, hint = getattr(component, field.name), hints[field.name]
            others = _others(hint, value)
            arguments.append(VariedArgument(field.name, value, others, str in _kinds(hint)))
            for index, entry in _entries(value):
                candidates = _others(type(entry), entry)
                others = tuple(_with_entry(value, index, other) for other in candidates)
                arguments.append(VariedArgument(field.name, value, others))
    return arguments


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """(index or key, entry) of a list or mapping; none of anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _with_entry(value: Any, index: Any, entry: Any) -> Any:
    """A copy of a list or mapping with another entry at one index or key."""
    if isinstance(value, Mapping):
        return {**value, index: entry}
    return type(value)([*value[:index], entry, *value[index + 1 :]])


def _others(hint: Any, value: Any) -> tuple[Any, ...]:
    candidates = [entry for kind in _kinds(hint) for entry in _values(kind, value)]
    return tuple(entry for entry in dict.fromkeys(candidates) if entry != value)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The members of a union; or the only one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _values(kind: Any, value: Any) -> list[Any]:
    if kind is bool:
        return [True, False]
    if kind is type(None):
        return [None]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind not in (int, float) or isinstance(value, bool):
        return []
    scaled = [value * factor for factor in FACTORS] if isinstance(value, int | float) else []
    return [
        kind(number) for number in (*scaled, *NUMBERS) if kind is float or number == int(number)
    ]


def silent_arguments(cls: type) -> tuple[str, ...]:
    """NO_EFFECT_ON_NUMBERS of a class and its bases."""
    return tuple(
        name for base in cls.__mro__ for name in vars(base).get("NO_EFFECT_ON_NUMBERS", ())
    )


def demand_use(component: Any) -> None:
    """Raises Violation for an argument that is only checked and never used, where no input is known
    that shows its effect. Skips the check if a method hands the component on as a whole."""
    cls = type(component)
    read = attributes_read(cls)
    if read is None:
        pytest.skip("not tried: a function elsewhere may use its arguments")
    for argument in arguments_of(component):
        if argument.name not in (*read, *silent_arguments(cls)):
            raise Violation(
                f"{argument.name} has no effect: no method uses it",
                "use it, or take the argument away",
                place_of(cls),
            )


def check_variants(variants: Iterable[Changes], check: Callable[[Changes], None]) -> None:
    """Make a check with each of these changes; a Violation names those with which it fails."""
    for changes in variants:
        try:
            check(changes)
        except Violation as violation:
            raise Violation(
                f"with {described(changes)}: {violation.finding}", violation.cause, violation.where
            ) from violation


def described(changes: Changes) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def run_each(tests: Iterable[Callable[..., None]], *subjects: Any) -> None:
    """Run those checks that concern the subjects: the others skip themselves."""
    for test in tests:
        with contextlib.suppress(pytest.skip.Exception):
            test(*subjects)


def values_like(value: Any) -> list[Any]:
    """Other values of the same kind, each changed in one place; none like null."""
    if isinstance(value, str):
        return [f"{value} differently"] if value else []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    return [
        _with_entry(value, index, other)
        for index, entry in _entries(value)
        for other in values_like(entry)
    ]
