"""Whether the arguments of an interface are possible, beyond its `LIMITS` and `NEEDS`. Each check
takes an interface, or any object with its arguments as attributes, and raises ValueError. No torch:
`rlcli check` imports this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcli.api.config import GenerationHyperparameters


def check_overlong(settings: Any) -> None:
    """The arguments that all estimators share."""
    buffer, limit = settings.overlong_buffer, settings.overlong_limit
    if buffer is not None and limit is not None and buffer > limit:
        raise ValueError(f"overlong_buffer is {buffer}; it must be at most {limit}, overlong_limit")


def check_group_relative(settings: Any) -> None:
    """The arguments of `group_relative`."""
    check_overlong(settings)
    if compares_groups(settings) and settings.train_on_best == 1:
        raise ValueError(
            f"baseline: {settings.baseline} with scale: {settings.scale} compares responses to one "
            "prompt: set train_on_best above 1"
        )


def compares_groups(settings: Any) -> bool:
    """Whether advantages of `group_relative` depend on other responses to the same prompt."""
    return settings.baseline in ("group", "leave_one_out") or settings.scale in ("group", "mean")


def check_episodes(settings: Any) -> None:
    """The arguments of `episodes`."""
    generation, turn = settings.generation, settings.turn_tokens
    if not isinstance(generation, GenerationHyperparameters):  # a mapping, or left out
        fields = generation if isinstance(generation, Mapping) else {}
        generation = GenerationHyperparameters(**fields)
    if turn is not None and turn < generation.min_new_tokens:
        raise ValueError(
            f"turn_tokens is {turn}; it must be at least {generation.min_new_tokens}, "
            "generation.min_new_tokens"
        )
    if generation.routing_replay:
        raise ValueError("generation.routing_replay is not available for episodes")


def check_reference(settings: Any) -> None:
    """The arguments of `reference`. Its temperature is that of `generation`, which has a limit of
    its own: one mistake is one error."""
    if settings.temperature <= 0:
        raise ValueError(f"temperature is {settings.temperature}; it must be above 0")
