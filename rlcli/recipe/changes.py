"""What a recipe may change when a run is resumed: every key is safe, or alters the experiment, or makes it another.

Of a backend's arguments it says so itself, in literals of its class:

    ON_RESUME: ClassVar[dict[str, str]] = {"gradient_checkpointing": "safe"}
    FOLLOWS_LENGTH: ClassVar[dict[str, str]] = {"schedule": "constant"}

The second names arguments which let the steps depend on how long the run is, unless they have the value given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlcli.recipe.components import argument_of, declared
from rlcli.recipe.schema import Component, Recipe
from rlcli.recipe.tree import dotted


class Kind(Enum):
    """What a change means for a run that is half done."""

    SAFE = "safe"
    """How, where and how long: the steps that are left compute what they would have computed."""
    ALTERS = "alters"
    """The steps that are left learn in another way. Wanted at times, so it must be said."""
    FORBIDDEN = "forbidden"
    """What was saved does not belong to such a run."""


RULES: dict[str, Kind] = {
    "name": Kind.SAFE,
    "seed": Kind.FORBIDDEN,
    "cluster": Kind.SAFE,
    "launch": Kind.SAFE,
    "checkpoint": Kind.SAFE,
    "log": Kind.SAFE,
    "generation": Kind.ALTERS,
    "graph": Kind.ALTERS,
    "graph.*.model": Kind.FORBIDDEN,
    "graph.*.call": Kind.FORBIDDEN,
    "graph.*.interface.type": Kind.FORBIDDEN,
    "graph.*.microbatches": Kind.SAFE,
    "graph.*.max_tokens_per_microbatch": Kind.SAFE,
    "datasets": Kind.ALTERS,
    "models": Kind.FORBIDDEN,
    "models.*.backend": Kind.ALTERS,
    "models.*.mesh": Kind.SAFE,
    "models.*.devices": Kind.SAFE,
    "train": Kind.ALTERS,
    "train.steps": Kind.SAFE,
    "train.epochs": Kind.SAFE,
    "train.microbatches": Kind.SAFE,
    "train.max_tokens_per_microbatch": Kind.SAFE,
    "train.max_redraws": Kind.SAFE,
    "train.max_staleness": Kind.ALTERS,
    "train.max_nonfinite_streak": Kind.SAFE,
    "train.eval": Kind.SAFE,
    "train.dataset": Kind.FORBIDDEN,
    "train.shuffle": Kind.FORBIDDEN,
}
"""Key → what changing it means; `*` is any name, and the longest rule that fits decides."""


LENGTH = ("train.steps", "train.epochs")
"""Another length is safe unless a backend follows it, such as by a learning rate that decays over it and then jumps."""


@dataclass(frozen=True)
class Change:
    """One key with another value than the run began with; None: it was not there, or is not any more."""

    key: str
    before: Any
    now: Any
    kind: Kind


def changes(before: Recipe, now: Recipe) -> list[Change]:
    """What differs between two recipes, in the order of their keys."""
    old, new = (dict(_leaves((), recipe.model_dump(mode="json"))) for recipe in (before, now))
    follows = follows_length(before)
    return [
        Change(dotted(path), old.get(path), new.get(path), _kind(path, now, follows))
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    ]


def follows_length(recipe: Recipe) -> bool:
    """Whether a run of another length would have learned in another way from the start."""
    return any(_follows_length(model.backend) for model in recipe.models.values() if model.backend is not None)


def longer(run: str, recipe: Recipe) -> str:
    """The command that continues a run which is over."""
    key = "train.steps" if recipe.train.steps is not None else "train.epochs"
    return f"rlcli resume {run} {key}=N{' --accept-changes' if follows_length(recipe) else ''}"


def _kind(path: tuple[str, ...], now: Recipe, follows: bool) -> Kind:
    return Kind.ALTERS if follows and dotted(path) in LENGTH else kind_of_change(path, now)


def _follows_length(backend: Component) -> bool:
    steady = declared("backends", backend.type, "FOLLOWS_LENGTH") or {}
    return any(argument_of("backends", backend.type, backend.args, name) != value for name, value in steady.items())


def kind_of_change(path: tuple[str, ...], recipe: Recipe) -> Kind:
    """As the backend says whose argument it is, or by the longest rule that is a beginning of the path."""
    match path:
        case ("models", role, "backend", "args", argument, *_) if role in recipe.models:
            backend = recipe.models[role].backend
            said = declared("backends", backend.type, "ON_RESUME") if backend is not None else None
            if said and argument in said:
                return Kind(said[argument])
    fitting = [rule for rule in RULES if _fits(tuple(rule.split(".")), path)]
    return RULES[max(fitting, key=lambda rule: rule.count("."))]


def _fits(rule: tuple[str, ...], path: tuple[str, ...]) -> bool:
    return len(rule) <= len(path) and all(a in ("*", b) for a, b in zip(rule, path, strict=False))


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):  # an empty one says nothing: what it lacks is listed where the other recipe has it
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    else:
        yield path, value
