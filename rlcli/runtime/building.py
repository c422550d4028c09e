"""The start of a run: its ranks measure what the recipe leaves open, then build their models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlcli.recipe.measured_arguments import Choice, fastest, roles_to_measure
from rlcli.recipe.schema import Recipe
from rlcli.runtime.ranks import Ranks


@dataclass(frozen=True)
class Built:
    """The ranks' answers once they have built their models."""

    answers: Mapping[int, Mapping[str, Any]]
    """Rank → its answer."""
    choices: tuple[Choice, ...]


async def build_models(ranks: Ranks, recipe: Recipe, steps: int, rows: int) -> Built:
    """Have the ranks build the models of a run of `steps` over `rows` of training data, all with
    the same choices."""
    deadline = recipe.launch.startup_deadline
    choices = list[Choice]()
    if roles := roles_to_measure(recipe):
        measured = await ranks.ask_all("measure", {"roles": roles}, deadline=deadline)
        choices = fastest(measured.values())
    args = {"steps": steps, "rows": rows, "choices": [asdict(choice) for choice in choices]}
    answers = await ranks.ask_all("build", args, deadline=deadline)
    return Built(answers, tuple(choices))
