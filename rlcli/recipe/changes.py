"""What a recipe may change when a run is resumed: every key is safe, or alters the experiment, or makes it another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlcli.recipe.schema import Recipe
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
    "models.*.backend.args.gradient_checkpointing": Kind.SAFE,
    "models.*.backend.args.kv_cache_tokens": Kind.SAFE,
    "models.*.mesh": Kind.SAFE,
    "models.*.devices": Kind.SAFE,
    "train": Kind.ALTERS,
    "train.steps": Kind.SAFE,
    "train.epochs": Kind.SAFE,
    "train.microbatches": Kind.SAFE,
    "train.max_tokens_per_microbatch": Kind.SAFE,
    "train.max_nonfinite_streak": Kind.SAFE,
    "train.eval": Kind.SAFE,
    "train.dataset": Kind.FORBIDDEN,
    "train.shuffle": Kind.FORBIDDEN,
}
"""Key → what changing it means; `*` is any name, and the longest rule that fits decides."""


LENGTH = ("train.steps", "train.epochs")
"""Another length is safe unless learning rates decay over it: those of the steps that are left then jump."""


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
    backends = [model.backend for model in before.models.values() if model.backend is not None]
    decays = any(backend.args.get("schedule", "constant") != "constant" for backend in backends)
    return [
        Change(dotted(path), old.get(path), new.get(path), _kind(path, decays))
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    ]


def _kind(path: tuple[str, ...], decays: bool) -> Kind:
    return Kind.ALTERS if decays and dotted(path) in LENGTH else kind_of_change(path)


def kind_of_change(path: tuple[str, ...]) -> Kind:
    """By the longest rule that is a beginning of the path."""
    fitting = [rule for rule in RULES if _fits(tuple(rule.split(".")), path)]
    return RULES[max(fitting, key=lambda rule: rule.count("."))]


def _fits(rule: tuple[str, ...], path: tuple[str, ...]) -> bool:
    return len(rule) <= len(path) and all(a in ("*", b) for a, b in zip(rule, path, strict=False))


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    else:
        yield path, value
