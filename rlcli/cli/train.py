"""`rlcli train`: run a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.recipe_arguments import Overrides, RecipeName, With, load
from rlcli.cli.supervision import NoSupervisor, is_to_supervise, supervise

if TYPE_CHECKING:
    from rlcli.launch.run import Finished


def train(
    context: typer.Context,
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of the run [runs/<recipe>/<time>].")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and the report.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    no_supervisor: NoSupervisor = False,
) -> int:
    """Run a recipe: check it, run what it starts from, train, evaluate, save.

    Example: rlcli train ppo_math ppo.kl_ctl=0.02 launch=local cluster.devices_per_node=2
    """
    if is_to_supervise(context, no_supervisor):
        return supervise(context, quiet, as_json)

    from rlcli.launch.run import run_recipe
    from rlcli.observe.display import open_display
    from rlcli.recipe.warm_start import chain

    resolved = load(recipe, overrides, with_)
    chain(resolved)  # what it starts from must be sound too, before anything is started
    with open_display(quiet=quiet) as display:
        finished = run_recipe(resolved, run_dir, display)
    return tell(finished, as_json)


def tell(finished: Finished, as_json: bool) -> int:
    """How a run ended, for people or as JSON; returns its exit code."""
    from rlcli.cli.output import print_json, print_talk
    from rlcli.observe.report import before_and_after, print_report
    from rlcli.observe.terminal import short_path

    outcome = finished.outcome
    if as_json:
        print_json(
            {
                "ok": finished.exit_code == 0,
                "exit_code": finished.exit_code,
                "run_dir": str(outcome.run_dir),
                "steps": finished.steps_done,
                "models": {role: str(folder) for role, folder in outcome.models.items()},
                "results": [vars(row) for row in before_and_after(outcome.records)],
            }
        )
    else:
        print_report(outcome)
    if finished.exit_code:
        again = short_path(outcome.run_dir)
        print_talk(f"stopped at step {finished.steps_done} of {finished.steps}. To continue: rlcli resume {again}")
    return finished.exit_code
