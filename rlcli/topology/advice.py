"""Finds settings that bring a call's memory down to what a device has, by trying them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlcli.api.architecture import Architecture
from rlcli.topology.memory import Peak, plan_memory
from rlcli.topology.placement import plan_topology

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe

MOST_DEVICES = 8

Settings = dict[str, Any]
"""Key of the recipe → value."""


def advise(
    recipe: Recipe, sizes: Mapping[str, Architecture | str], peak: Peak, device_bytes: int, reserved: int
) -> tuple[str, ...]:
    """Overrides with which the call fits, the cheapest that do; none if no candidate is enough."""
    for settings in _candidates(recipe, peak):
        changed = recipe
        for key, value in settings.items():
            changed = with_value(changed, key.split("."), value)
        after = _peak_of(changed, sizes, peak)
        if after is not None and after.verdict(device_bytes, reserved) != "too much":
            return tuple(f"{key}={_text(value)}" for key, value in settings.items())
    return ()


def _candidates(recipe: Recipe, peak: Peak) -> Iterator[Settings]:
    """Candidate settings, in order of increasing cost."""
    cheap: Settings = {}
    backend = recipe.models[peak.role].backend
    if peak.phase == "generate":
        slots = recipe.generation.model_dump()["max_concurrent_responses"]
        yield from ({"generation.max_concurrent_responses": slots >> halvings} for halvings in _halvings(slots, 8))
    offload = {f"graph.{name}.hooks.offload": True for name in _calls_of_idle_roles(recipe)}
    if offload and recipe.cluster.device != "cpu":
        yield offload
    if peak.phase == "update" and backend is not None and not backend.args.get("gradient_checkpointing"):
        cheap = {f"models.{peak.role}.backend.args.gradient_checkpointing": True}
        yield cheap
    if peak.phase in ("update", "inference"):
        cap = recipe.train.max_tokens_per_microbatch
        for settings in ({}, cheap) if cheap else ({},):
            for halvings in _halvings(cap, 512):
                yield {**settings, "train.max_tokens_per_microbatch": cap >> halvings}
    if peak.phase == "checkpoint" and recipe.checkpoint.asynchronous:
        yield {"checkpoint.asynchronous": False}
    devices = recipe.cluster.devices_per_node
    while (devices := devices * 2) <= MOST_DEVICES:
        more = {"cluster.devices_per_node": devices, "launch.type": "local"}
        yield more
        if cheap:
            yield {**cheap, **more}


def _halvings(value: int, least: int) -> range:
    return range(1, max(1, (value // least).bit_length()))


def _calls_of_idle_roles(recipe: Recipe) -> list[str]:
    """Calls of roles that only score: these may be offloaded to host memory while others work."""
    evaluating = {call.model for call in recipe.train.eval.graph.values()}
    scoring = {call.model for call in recipe.graph.values() if call.call == "inference"}
    idle = {role for role in scoring - evaluating - {*recipe.trained_roles} if recipe.models[role].has_weights}
    return [name for name, call in recipe.graph.items() if call.model in idle and not call.hooks.offload]


def _peak_of(recipe: Recipe, sizes: Mapping[str, Architecture | str], peak: Peak) -> Peak | None:
    try:
        topology = plan_topology(recipe)
    except ValueError:  # a role whose devices do not follow the cluster's
        return None
    least = _longest_sample(recipe, sizes)
    if recipe.train.max_tokens_per_microbatch < least:
        return None
    found = plan_memory(recipe, topology, sizes).peaks
    return next((one for one in found if (one.call, one.role) == (peak.call, peak.role)), None)


def _longest_sample(recipe: Recipe, sizes: Mapping[str, Architecture | str]) -> int:
    from rlcli.recipe.lengths import kept_together
    from rlcli.topology.lengths import group_size, lengths_of

    return kept_together(recipe, group_size(recipe)) * lengths_of(recipe).sequence


def with_value(node: Any, keys: list[str], value: Any) -> Any:
    """A copy of a section, or of a mapping in it, with another value at a path."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(node, Mapping):
        return {**node, key: with_value(node.get(key), rest, value)}
    return node.model_copy(update={key: with_value(getattr(node, key), rest, value)})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
