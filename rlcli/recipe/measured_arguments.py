"""Arguments of backends that a recipe leaves to a measurement: `auto` becomes the value with which
the ranks of a role are fastest, once, when a run first starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlcli.recipe.components import argument_of, declared
from rlcli.recipe.schema import Component, Recipe

AUTO = "auto"
ADVANTAGE = 1.2
"""How many times as fast another value must be than the first, which is the most exact one."""

Seconds = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Role → argument → each value, the most exact one first → seconds that the same work takes."""


@dataclass(frozen=True)
class Choice:
    """The value that an argument of a role's backend gets."""

    role: str
    argument: str
    value: str
    reason: str

    @property
    def key(self) -> str:
        return f"models.{self.role}.backend.args.{self.argument}"


def roles_to_measure(recipe: Recipe) -> list[str]:
    """Roles with an argument that their backend measures. A role that follows another by a moving
    average is not among them: its weights stay as exact as they are."""
    averages = {call.hooks.copy_to for call in recipe.graph.values() if call.hooks.eta < 1}
    return [
        name
        for name, role in recipe.models.items()
        if name not in averages and _left_open(role.engine)
    ]


def fastest(answers: Iterable[Seconds]) -> list[Choice]:
    """The choices that follow from what each rank has measured.

    Of a role the slowest rank counts, since the others wait for it. Roles with the same
    alternatives get the same value, that with the smallest sum: an actor, its reference and its
    sampler are compared with each other.
    """
    slowest: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for answer in answers:
        for role, arguments in answer.items():
            for argument, seconds in arguments.items():
                _raise_to(seconds, slowest[argument][role])
    return [
        Choice(role, argument, value, reason)
        for argument, roles in slowest.items()
        for members, (value, reason) in _decisions(roles)
        for role in members
    ]


def _raise_to(seconds: Mapping[str, float], slowest: dict[str, float]) -> None:
    for value, time in seconds.items():
        slowest[value] = max(time, slowest.get(value, 0.0))


def _decisions(
    roles: Mapping[str, Mapping[str, float]],
) -> Iterator[tuple[list[str], tuple[str, str]]]:
    """Roles with the same alternatives, and their value with its reason."""
    members: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for role, seconds in roles.items():
        members[tuple(seconds)].append(role)
    for values, names in members.items():
        yield (
            names,
            _decision({value: sum(roles[name][value] for name in names) for value in values}),
        )


def with_choices(recipe: Recipe, choices: Sequence[Choice]) -> Recipe:
    """The recipe with each choice as if it had been written there."""
    models = dict(recipe.models)
    for choice in choices:
        role = models[choice.role]
        arguments = {**role.engine.args, choice.argument: choice.value}
        backend = role.engine.model_copy(update={"args": arguments})
        models[choice.role] = role.model_copy(update={"backend": backend})
    return recipe.model_copy(update={"models": models})


def with_choices_of(before: Recipe, now: Recipe) -> Recipe:
    """The recipe that a run is resumed with: what it leaves to a measurement stays as it was."""
    chosen = []
    for name in roles_to_measure(now):
        backend = now.models[name].engine
        earlier = before.models[name].engine if name in before.models else None
        if earlier is None or earlier.type != backend.type:
            continue
        for argument in _left_open(backend):
            value = argument_of("backends", earlier, argument)
            if value != AUTO:
                chosen.append(Choice(name, argument, value, "chosen when the run started"))
    return with_choices(now, chosen)


def _left_open(backend: Component) -> list[str]:
    measured = declared("backends", backend.type, "MEASURED") or ()
    return [argument for argument in measured if argument_of("backends", backend, argument) == AUTO]


def _decision(seconds: Mapping[str, float]) -> tuple[str, str]:
    """The value to take, and why."""
    most_exact, *others = seconds
    value = min(others, key=lambda name: seconds[name], default=most_exact)
    times = seconds[most_exact] / seconds[value]
    if times >= ADVANTAGE:
        return value, f"measured: {times:.1f} times as fast as {most_exact}"
    if times > 1:
        return most_exact, f"measured: {value} is not much faster"
    return most_exact, f"measured: {1 / times:.1f} times as fast as {value}"
