"""Sequence lengths and group sizes, derived only from the recipe and the model's config.json."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.interface import cut_of
from rlcli.api.key_meaning import SEQUENCES
from rlcli.files import known_object
from rlcli.recipe.components import (
    argument_named,
    argument_of,
    declared,
    declared_mapping,
    with_sources,
)
from rlcli.recipe.graph import compares_samples
from rlcli.recipe.role_sources import weights_origin
from rlcli.recipe.schema import Call, Component, Recipe

MAX_CONFIG_BYTES = 1 << 20


def generation_of(recipe: Recipe, call: Call) -> Mapping[str, Any]:
    """How a call samples: its interface's arguments, merged over the defaults. Only what an
    interface without such an argument does is taken to be in the recipe's section."""
    told, presets = call.interface.args.get("generation"), default_generation(call.interface.type)
    if told is None and presets is None:
        return recipe.generation.model_dump()
    defaults = dataclasses.asdict(GenerationHyperparameters())
    return {**defaults, **(presets or {}), **(told or {})}


def default_generation(interface: str) -> Mapping[str, Any] | None:
    """How an interface samples without its argument `generation`: what differs from the defaults;
    None if it has no such argument, one of another kind, or only its source knows."""
    argument = argument_named("interfaces", interface, "generation")
    if argument is None:
        return None
    settings = {each.name for each in argument.fields}
    defaults = dataclasses.asdict(GenerationHyperparameters())
    return argument.presets if defaults.keys() <= settings else None


def written_beyond(call: Call) -> tuple[int, int] | None:
    """(prompt overhead in tokens, tokens generated after it) for a call whose engine generates
    although the call is not `generate` (GENERATES); None for any other."""
    parts = declared_mapping("interfaces", call.interface.type, "GENERATES").get(call.call)
    if not isinstance(parts, dict):
        return None

    def tokens(segment: str) -> int:
        terms = (
            argument(term) if isinstance(term, str) else term for term in parts.get(segment, ())
        )
        return sum(term for term in terms if isinstance(term, int))

    def argument(name: str) -> Any:
        return argument_of("interfaces", call.interface, name)

    return tokens("prompt"), tokens("response")


def responses_of(recipe: Recipe, call: Call) -> int:
    """The number of responses per prompt that a call makes."""
    responses = generation_of(recipe, call)["responses_per_prompt"]
    return max(1, responses) if isinstance(responses, int) else 1


def kept_together(recipe: Recipe, responses: int) -> int:
    """How many of a prompt's responses must fit into one micro-batch: all of them, unless every
    interface that runs a model on them allows groups to be cut (`CUT`)."""
    calls = [
        call
        for call in recipe.graph.values()
        if call.call != "generate" and runs_a_model(recipe, call)
    ]
    return max((responses if keeps_groups(call) else 1 for call in calls), default=1)


def keeps_groups(call: Call) -> bool:
    """Whether a call needs all responses to a prompt in one micro-batch."""
    return cut_of(declared("interfaces", call.interface.type, "CUT"), call.call) != "sequence"


def runs_a_model(recipe: Recipe, call: Call) -> bool:
    """Whether a call has its role's model compute something: not one that only compares samples."""
    role = recipe.models.get(call.model)
    return role is not None and role.has_weights and not compares_samples(call)


def scores_sequences(recipe: Recipe, call: Call) -> bool:
    """Whether a call has its role's model read whole sequences."""
    return call.call != "generate" and SEQUENCES in call.inputs and runs_a_model(recipe, call)


def limit_of_rows(dataset: Component) -> int | None:
    """Tokens of the longest row, if set in the recipe (`max_length`) or declared by the dataset's
    class (LONGEST); a default that was not chosen says nothing about the rows."""
    limit = dataset.args.get("max_length")
    if limit is None:
        limit = declared("datasets", dataset.type, "LONGEST")
    return limit if isinstance(limit, int) and limit > 0 else None


def sequences_of_row(recipe: Recipe) -> int:
    """Maximum number of sequences in a row that is trained on: two per pair, where the dataset's
    class names the argument with the number of pairs (PAIRS); otherwise one."""
    most = 1
    for name in with_sources(recipe.datasets, recipe.train.dataset):
        dataset = recipe.datasets[name]
        argument = declared("datasets", dataset.type, "PAIRS")
        pairs = argument_of("datasets", dataset, argument) if isinstance(argument, str) else None
        most = max(most, 2 * pairs if isinstance(pairs, int) else 1)
    return most


def cache_of(recipe: Recipe, role: str) -> int | None:
    """Capacity of a role's KV cache in tokens; None if its backend sets no limit,
    or has no such argument."""
    if role not in recipe.models:
        return None
    tokens = argument_of("backends", recipe.models[role].engine, "kv_cache_tokens")
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None


def positions_of(
    recipe: Recipe, role: str, positions_by_role: Mapping[str, int] | None = None
) -> tuple[int, str] | None:
    """The number of positions of a role's model, and the role whose weights determine it; None if
    unknown here: the model is on the Hub, or is the result of another recipe and not among
    `known`."""
    if role not in recipe.models or not recipe.models[role].has_weights:
        return None
    role = weights_origin(recipe, role)
    if positions_by_role and role in positions_by_role:
        return positions_by_role[role], role
    section = recipe.models[role]
    config: Any = section.scratch
    if config is None and section.path is not None and section.warm_start is None:
        config = known_object(
            os.path.join(os.path.expanduser(section.path), "config.json"), MAX_CONFIG_BYTES
        )
    inner = config.get("text_config") if isinstance(config, dict) else None
    for settings in (inner, config):
        positions = settings.get("max_position_embeddings") if isinstance(settings, dict) else None
        if isinstance(positions, int) and not isinstance(positions, bool) and positions > 0:
            return positions, role
    return None
