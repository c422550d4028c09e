"""`rlcli train`: run a recipe."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.arguments import Overrides, Quiet, RecipeName, With, load
from rlcli.cli.jobs import refuse_dry_run, tell_script, tell_submitted
from rlcli.cli.output import print_json, print_talk
from rlcli.cli.short_options import tell_recipe
from rlcli.cli.supervision import (
    NoSupervisor,
    is_to_supervise,
    keep_json_apart,
    keep_run_private,
    supervise,
)
from rlcli.cli.sweeps import SweepOptions, train_sweep
from rlcli.errors import UsageError

if TYPE_CHECKING:
    from rlcli.launch.drive import Finished
    from rlcli.recipe.resolve import Resolved

SWEEP = "Sweep"
"""The group of these options on the help page."""


def train(
    context: typer.Context,
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", metavar="DIR", help="Folder of the run [runs/<recipe>/<time>]."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=V,V",
            help="A run for each value; repeatable.",
            rich_help_panel=SWEEP,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", metavar="N", min=1, help="Each run with N seeds.", rich_help_panel=SWEEP
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--at-once",
            metavar="N",
            min=1,
            help="Runs at a time; default: as many as fit on the GPUs.",
            rich_help_panel=SWEEP,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="STEPS", help="Trace the calls of a step, or of some: 2-3."
        ),
    ] = None,
    no_check: Annotated[
        bool,
        typer.Option("--no-check", help="Skip the checks of rows and rewards before training."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only print the batch script of launch=slurm."),
    ] = False,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    no_supervisor: NoSupervisor = False,
) -> int:
    """Run a recipe, or sft, dpo, kto, reward, grpo, ppo with your --model and --data.

    Example: rlcli train sft --model Qwen/Qwen2.5-0.5B-Instruct --data rows.jsonl
    """
    if profile is not None:
        overrides = [*(overrides or ()), f"log.profile={profile}"]
    if sweep or seeds is not None:
        options = SweepOptions(
            settings=sweep or (),
            seeds=seeds,
            at_once=at_once,
            run_dir=run_dir,
            dry_run=dry_run,
            no_check=no_check,
            as_json=as_json,
        )
        return train_sweep(context, recipe, overrides, with_, options)
    _refuse_at_once(at_once)
    keep_run_private(context)
    is_parent = is_to_supervise(context, no_supervisor)

    from rlcli.recipe.warm_start import chain

    resolved = load(recipe, overrides, with_)
    chain(resolved)  # the recipes it starts from must be valid too, before anything is started
    is_job = resolved.recipe.launch.type == "slurm"
    if not is_job:
        refuse_dry_run(dry_run)
    if is_parent and not is_job:
        return supervise(context, quiet, as_json)
    tell_recipe(resolved, context)
    if is_job:
        return _submit(resolved, run_dir, dry_run, no_check, as_json)

    from rlcli.launch.run import run_recipe
    from rlcli.observe.display import open_display

    keep_json_apart(context, as_json)
    with open_display(quiet=quiet) as display:
        finished = run_recipe(resolved, run_dir, display, check_rows=not no_check)
    return tell(finished, as_json)


def _submit(
    resolved: Resolved, run_dir: Path | None, dry_run: bool, no_check: bool, as_json: bool
) -> int:
    from rlcli.launch.slurm.submit import planned, submit_run

    if dry_run:
        return tell_script(planned(resolved, run_dir), as_json)
    job_id, folder = submit_run(resolved, run_dir, warn=None if no_check else print_talk)
    return tell_submitted(job_id, folder, [folder], as_json)


def _refuse_at_once(at_once: int | None) -> None:
    if at_once is not None:
        raise UsageError("--at-once is for sweeps", hint="add --sweep KEY=VALUE,VALUE or --seeds N")


def tell(finished: Finished, as_json: bool) -> int:
    """Print how a run ended, as text or as JSON; returns its exit code."""
    from rlcli.observe.report import print_report
    from rlcli.observe.terminal import short_path

    if as_json:
        print_json(_as_document(finished))
    else:
        print_report(finished.outcome)
    if finished.exit_code:
        folder = shlex.quote(short_path(finished.outcome.run_dir))
        print_talk(
            f"stopped at step {finished.steps_done} of {finished.steps}. To "
            f"continue: rlcli resume {folder}"
        )
    return finished.exit_code


def _as_document(finished: Finished) -> dict[str, Any]:
    from rlcli.observe.profile import traces
    from rlcli.observe.report import before_and_after

    outcome = finished.outcome
    models = {role: str(folder) for role, folder in outcome.models.items()}
    results = [row.as_document() for row in before_and_after(outcome.records)]
    return {
        "ok": finished.exit_code == 0,
        "exit_code": finished.exit_code,
        "run_dir": str(outcome.run_dir),
        "steps": finished.steps_done,
        "models": models,
        "results": results,
        "profile": [str(file) for file in traces(outcome.run_dir)],
    }
