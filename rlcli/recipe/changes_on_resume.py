"""Recipe changes allowed on resume: each key is safe, alters the experiment,
or makes it a different one.

A backend classifies its own arguments, in literals of its class:

    ON_RESUME: ClassVar[dict[str, str]] = {"gradient_checkpointing": "safe"}
    FOLLOWS_LENGTH: ClassVar[dict[str, str]] = {"schedule": "constant"}

The second names arguments that make the steps depend on the length of the run,
unless they have the given value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlcli.recipe.components import argument_of, declared_mapping
from rlcli.recipe.parsing.places import covers
from rlcli.recipe.parsing.tree import KeyPath, dotted, plain_leaves
from rlcli.recipe.schema import Component, Recipe


class Kind(Enum):
    """Effect of a change on a half-finished run."""

    SAFE = "safe"
    """How, where and how long to train: the remaining steps compute what they would have
    computed."""
    ALTERS = "alters"
    """The remaining steps learn differently. Sometimes intended,
    so it must be requested explicitly."""
    FORBIDDEN = "forbidden"
    """The saved state does not belong to such a run."""


RULES: dict[str, Kind] = {
    "format": Kind.SAFE,
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
    "graph.*.hooks.copy_to": Kind.FORBIDDEN,
    "graph.*.hooks.offload": Kind.SAFE,
    "graph.*.hooks.transfer": Kind.SAFE,
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
    "train.max_nonfinite_streak": Kind.SAFE,
    "train.eval": Kind.SAFE,
    "train.dataset": Kind.FORBIDDEN,
    "train.shuffle": Kind.FORBIDDEN,
}
"""Key → effect of changing it; `*` is any name, and the longest matching rule decides."""


LENGTH = ("train.steps", "train.epochs")
"""Safe to change unless a backend depends on the length, such as by a learning rate decaying over
it, which jumps."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs from that at the start of the run; None: absent before,
    or absent now."""

    key: str
    before: Any
    now: Any
    kind: Kind


def changes(before: Recipe, now: Recipe) -> list[Change]:
    """The differences between two recipes, in the order of their keys."""
    old, new = _values(before), _values(now)
    follows = follows_length(before)
    return [
        Change(dotted(path), old.get(path), new.get(path), kind_of_change(path, now, follows))
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    ]


def follows_length(recipe: Recipe) -> bool:
    """Whether a run of a different length would have learned differently from the start."""
    return any(_follows_length(role.engine) for role in recipe.models.values())


def longer(run: str, recipe: Recipe) -> str:
    """The command that continues a finished run."""
    key = "train.steps" if recipe.train.steps is not None else "train.epochs"
    return f"rlcli resume {run} {key}=N{' --accept-changes' if follows_length(recipe) else ''}"


def _follows_length(backend: Component) -> bool:
    steady = declared_mapping("backends", backend.type, "FOLLOWS_LENGTH")
    return any(argument_of("backends", backend, name) != value for name, value in steady.items())


def kind_of_change(path: KeyPath, recipe: Recipe, follows: bool) -> Kind:
    """Decided by the backend for its own arguments, otherwise by the longest rule that is a prefix
    of the path. `follows`: `follows_length` of the recipe before the change."""
    if follows and dotted(path) in LENGTH:
        return Kind.ALTERS
    match path:
        case ("models", str(role), "backend", "args", str(argument), *_) if role in recipe.models:
            kinds = declared_mapping("backends", recipe.models[role].engine.type, "ON_RESUME")
            if argument in kinds:
                return Kind(kinds[argument])
    fitting = [rule for rule in RULES if covers(tuple(rule.split(".")), path)]
    return RULES[max(fitting, key=lambda rule: rule.count("."))]


def _values(recipe: Recipe) -> dict[KeyPath, Any]:
    """The values of a recipe. An empty dict says nothing:
    missing keys are listed by the other recipe."""
    return {
        path: value for path, value in plain_leaves(recipe.model_dump(mode="json")) if value != {}
    }
