"""`rlcli resume`: resume an interrupted run."""

from __future__ import annotations

from typing import Annotated

import typer

from rlcli.cli.recipe_arguments import Overrides
from rlcli.cli.run_arguments import RunName
from rlcli.cli.supervision import NoSupervisor, is_to_supervise, supervise


def resume(
    context: typer.Context,
    run: RunName,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="RECIPE", help="Go on with this recipe instead of the run's own.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Let changes alter how the rest of the run learns.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and the report.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    no_supervisor: NoSupervisor = False,
) -> int:
    """Resume a run from its last checkpoint, exactly as if it had never stopped.

    Example: rlcli resume runs/ppo_math/20261121-120000 train.steps=80
    """
    if is_to_supervise(context, no_supervisor):
        return supervise(context, quiet, as_json)

    from rlcli.cli.output import print_text
    from rlcli.cli.train import tell
    from rlcli.launch.resume import resume_run
    from rlcli.observe.display import open_display
    from rlcli.observe.run_search import find_run

    with open_display(quiet=quiet) as display:
        resumed = resume_run(find_run(run), overrides or (), display, recipe_file=recipe, accept_changes=accept_changes)
    if resumed.longer and not as_json:
        print_text(f"run is complete ({resumed.step} steps). To train longer: {resumed.longer}")
        return 0
    return tell(resumed.finished, as_json)
