"""What a run keeps of its recipe: as given, as resolved, and what was measured at its start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.files import known_object
from rlcli.launch.memory_kills import write_estimate
from rlcli.observe.results import DIGEST_FILE

if TYPE_CHECKING:
    from rlcli.observe.display import Display
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.recipe.measured_arguments import Choice
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe

STARTS = "starts.json"


def write_recipe(run: RunDirectory, resolved: Resolved, recipe: Recipe, recipe_digest: str) -> None:
    """Write the recipe as given and as resolved, and the origin of each value. Once the last file
    is written, the run can be resumed."""
    for layer in resolved.layers:
        run.write_text(Path("recipe") / layer.label, layer.text)
    if resolved.overrides:
        run.write_text(Path("recipe") / "overrides.txt", "\n".join(resolved.overrides) + "\n")
    run.write_text("origins.json", json.dumps(resolved.origins, indent=2) + "\n")
    write_starts(run, recipe)
    run.write_text(DIGEST_FILE, recipe_digest + "\n")
    write_estimate(run, resolved)
    run.write_text(run.resolved_recipe.name, resolved.to_yaml())


def record_choices(run: RunDirectory, choices: Sequence[Choice], display: Display) -> None:
    """Write measured values into the resolved recipe: the run keeps them when it is resumed."""
    from rlcli.recipe.measured_arguments import with_choices
    from rlcli.recipe.resolve import load_recipe

    resolved = load_recipe(str(run.resolved_recipe), ())
    origins = known_object(run.origins) | {choice.key: choice.reason for choice in choices}
    run.write_text(run.origins.name, json.dumps(origins, indent=2) + "\n")
    text = replace(resolved, recipe=with_choices(resolved.recipe, choices)).to_yaml()
    run.write_text(run.resolved_recipe.name, text)
    for choice in choices:
        display.note(f"  {choice.key}={choice.value} ({choice.reason})")


def write_starts(run: RunDirectory, recipe: Recipe) -> None:
    """Write what each role starts from."""
    starts = {name: role.path for name, role in recipe.models.items() if role.path}
    run.write_text(STARTS, json.dumps(starts, indent=2) + "\n")
