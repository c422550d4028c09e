"""What calls ask of the backends of their roles."""

from __future__ import annotations

from rlcli.recipe.components import declared
from rlcli.recipe.graph import calls_of
from rlcli.recipe.lengths import written_beyond
from rlcli.recipe.schema import Call, Recipe

VERBS = {"TRAINS": "train", "SCORES": "score", "GENERATES": "generate"}
"""For each constant with which a backend declares an ability, a verb."""
_OF_CALLS = {
    "train_step": "TRAINS",
    "inference": "SCORES",
    "evaluate": "SCORES",
    "generate": "GENERATES",
}


def ability_for(call: Call) -> str | None:
    """The constant of `VERBS` that the backend of a call's role must declare; None if the call
    scores by generating."""
    ability = _OF_CALLS[call.call]
    return None if ability == "SCORES" and written_beyond(call) is not None else ability


def runs_calls_of(backend: str, role: str, recipe: Recipe) -> bool:
    """Whether a backend has the abilities for all calls of a role."""
    calls = [call for _, call in calls_of(recipe) if call.model == role]
    abilities = {ability for call in calls if (ability := ability_for(call)) is not None}
    return all(declared("backends", backend, ability) is not False for ability in abilities)
