"""`rlcli resume`: resume an interrupted run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rlcli.cli.arguments import Overrides, Quiet, RunName
from rlcli.cli.jobs import tell_submitted
from rlcli.cli.output import print_talk, print_text
from rlcli.cli.supervision import (
    NoSupervisor,
    is_to_supervise,
    keep_json_apart,
    keep_run_private,
    supervise,
)
from rlcli.cli.train import tell
from rlcli.observe.run_search import find_run
from rlcli.units import count


def resume(
    context: typer.Context,
    run: RunName,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="RECIPE", help="Continue with this recipe instead of the run's own."
        ),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Allow changes that affect the rest of training."),
    ] = False,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    no_supervisor: NoSupervisor = False,
    in_job: Annotated[bool, typer.Option("--in-job", hidden=True)] = False,
) -> int:
    """Resume a run from its last checkpoint, exactly as if it had never stopped.

    Example: rlcli resume runs/ppo_math/20261121-120000 train.steps=80 --accept-changes
    """
    keep_run_private(context)
    is_parent = is_to_supervise(context, no_supervisor)

    from rlcli.launch.resume import resume_run
    from rlcli.observe.display import open_display

    folder = find_run(run)
    if in_job and is_parent:
        return _in_allocation(
            folder,
            overrides or [],
            recipe,
            accept_changes,
            lambda: supervise(context, quiet, as_json, in_job),
        )
    if not in_job and _may_be_job(folder, overrides or [], recipe):
        job_id = _submit(folder, overrides or [], recipe, accept_changes)
        if job_id is not None:
            return tell_submitted(job_id, folder, [folder], as_json)
    if is_parent:
        return supervise(context, quiet, as_json)
    keep_json_apart(context, as_json)
    with open_display(quiet=quiet) as display:
        resumed = resume_run(
            folder, overrides or (), display, recipe_file=recipe, accept_changes=accept_changes
        )
    if resumed.longer and not as_json:
        steps = count(resumed.step, "step")
        print_text(f"run is complete ({steps}). To train longer: {resumed.longer}")
        return 0
    return tell(resumed.finished, as_json)


def _may_be_job(folder: Path, overrides: list[str], recipe: str | None) -> bool:
    """Whether the run may be a job, without reading the recipe,
    which the working process reads anyway."""
    from rlcli.launch.slurm.jobs import Submission

    is_told = recipe is not None or any(override.startswith("launch") for override in overrides)
    return is_told or Submission.read(folder) is not None


def _in_allocation(
    folder: Path,
    overrides: list[str],
    recipe: str | None,
    accept_changes: bool,
    work: Callable[[], int],
) -> int:
    """Execute the part of a run that belongs to the current allocation."""
    from rlcli.launch.resume import resumed_recipe
    from rlcli.launch.slurm.allocations import run_in_allocation

    now = resumed_recipe(folder, overrides, recipe_file=recipe, accept_changes=accept_changes)
    return run_in_allocation(folder, work, now.launch.slurm.requeues)


def _submit(
    folder: Path, overrides: list[str], recipe: str | None, accept_changes: bool
) -> str | None:
    """Submit the job that continues a run, and return its id; None if the run is not to be a job,
    or is complete."""
    from rlcli.launch.resume import found_from_here, is_complete, resumed_recipe
    from rlcli.launch.slurm.submit import submit_again
    from rlcli.launch.working_folder import in_its_folder
    from rlcli.observe.display import open_display
    from rlcli.observe.run_directory import RunDirectory

    now = resumed_recipe(folder, overrides, recipe_file=recipe, accept_changes=accept_changes)
    if now.launch.type != "slurm":
        return None
    with open_display(quiet=True) as display:
        if is_complete(folder, now, display):
            return None  # which needs no job to be reported
    named = ["--recipe", str(found_from_here(recipe))] if recipe else []
    options = [*named, *(["--accept-changes"] if accept_changes else [])]
    run = RunDirectory.open(folder)
    # where the job is to work, with which project
    with in_its_folder(run.path, "resume", print_talk):
        return submit_again(run.path, overrides, options, now)
