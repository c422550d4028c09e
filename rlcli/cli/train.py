"""`rlcli train`: run a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.api.run_folder import RESOLVED_RECIPE
from rlcli.cli.arguments import Overrides, Quiet, RecipeName, With, load
from rlcli.cli.compare import print_groups
from rlcli.cli.jobs import tell_script, tell_submitted
from rlcli.cli.output import print_json, print_talk
from rlcli.cli.short_options import tell_recipe
from rlcli.cli.status import as_document
from rlcli.cli.supervision import (
    NoSupervisor,
    is_to_supervise,
    keep_json_apart,
    keep_run_private,
    supervise,
)
from rlcli.errors import RlcliError, UsageError

if TYPE_CHECKING:
    from rlcli.launch.drive import Finished
    from rlcli.launch.sweep import Local, Sweep
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
        base = _base_of_sweep(context, recipe, overrides, with_, sweep)
        planned = _planned_sweep(base, recipe, overrides, sweep, seeds)
        return _sweep(planned, base, at_once, run_dir, dry_run, no_check, as_json)
    _refuse_at_once(at_once)
    keep_run_private(context)
    is_parent = is_to_supervise(context, no_supervisor)

    from rlcli.recipe.warm_start import chain

    resolved = load(recipe, overrides, with_)
    chain(resolved)  # the recipes it starts from must be valid too, before anything is started
    is_job = resolved.recipe.launch.type == "slurm"
    if not is_job:
        _refuse_dry_run(dry_run)
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


def _base_of_sweep(
    context: typer.Context,
    recipe: str,
    overrides: list[str] | None,
    layers: list[str] | None,
    swept: list[str] | None,
) -> Resolved:
    """The recipe without what is swept; that of the first run where it needs that."""
    from rlcli.recipe.sweep import sweep_runs

    first = sweep_runs(swept or (), seeds=None, first_seed=0)[0]
    try:
        base = load(recipe, overrides, layers)
    except RlcliError:
        return load(recipe, [*(overrides or ()), *first.settings], layers)
    tell_recipe(base, context)
    return base


def _planned_sweep(
    base: Resolved,
    recipe: str,
    overrides: list[str] | None,
    settings: list[str] | None,
    seeds: int | None,
) -> Sweep:
    from rlcli.launch.sweep import Sweep
    from rlcli.recipe.sweep import sweep_runs

    runs = sweep_runs(settings or (), seeds, base.recipe.seed)
    return Sweep.from_here(recipe, base.profiles, overrides or (), runs)


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


def _refuse_dry_run(dry_run: bool) -> None:
    if dry_run:
        hint = "rlcli plan shows what a run will do, rlcli check tries its data"
        raise UsageError("--dry-run needs launch=slurm", hint=hint)


def _sweep(
    sweep: Sweep,
    base: Resolved,
    at_once: int | None,
    run_dir: Path | None,
    dry_run: bool,
    no_check: bool,
    as_json: bool,
) -> int:
    """Run a sweep; returns the exit code."""
    from rlcli.launch.sweep import Local, check_all, first_goes_alone, open_sweep, slots
    from rlcli.observe.run_directory import fresh_folder
    from rlcli.observe.terminal import short_path

    check_all(sweep)
    if base.recipe.launch.type == "slurm":
        return _submit_sweep(sweep, base, at_once, run_dir, dry_run, no_check, as_json)
    _refuse_dry_run(dry_run)
    log_dir = Path(base.recipe.log.dir).expanduser()
    folder = run_dir or fresh_folder(log_dir / base.recipe.name)
    open_sweep(folder, sweep)
    print_talk(
        f"{len(sweep.runs)} runs -> {short_path(folder)}; rlcli status and rlcli attach show them"
    )
    goes_first = first_goes_alone(base, str(log_dir))
    local = Local(
        sweep, folder, slots(base, at_once), print_talk, goes_first, is_checked=not no_check
    )
    code = local.run()
    _tell_sweep(local, folder, code, as_json)
    return code


def _tell_sweep(local: Local, folder: Path, code: int, as_json: bool) -> None:
    """Print how the runs of a sweep ended."""
    from rlcli.launch.sweep import again
    from rlcli.observe.group_comparison import groups_of
    from rlcli.observe.terminal import short_path

    overviews = local.overviews()
    if as_json:
        shown = [
            {"name": run.name, "settings": run.settings} | (as_document(o) if o else {})
            for run, o in overviews
        ]
        print_json({"ok": code == 0, "exit_code": code, "sweep": str(folder), "runs": shown})
    else:
        folders = [overview.folder for _, overview in overviews if overview is not None]
        finished = [each for each in folders if (each / RESOLVED_RECIPE).is_file()]
        if finished:
            print_groups(groups_of(finished))
    name = short_path(folder)
    advice = f"to continue: {again(Path(name), sys.argv[1:])}"
    print_talk(f"curves: rlcli compare {name}" if code == 0 else advice)


def _submit_sweep(
    sweep: Sweep,
    base: Resolved,
    at_once: int | None,
    run_dir: Path | None,
    dry_run: bool,
    no_check: bool,
    as_json: bool,
) -> int:
    """Submit a sweep as one array of jobs."""
    from rlcli.launch.slurm.submit import planned_sweep, submit_sweep

    batch = planned_sweep(base, sweep, run_dir, at_once)
    if dry_run:
        return tell_script(batch, as_json)
    job_id = submit_sweep(batch, sweep, base, warn=None if no_check else print_talk)
    return tell_submitted(job_id, batch.folder, batch.runs, as_json)


def tell(finished: Finished, as_json: bool) -> int:
    """Print how a run ended, as text or as JSON; returns its exit code."""
    from rlcli.observe.profile import traces
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
                "results": [row.as_document() for row in before_and_after(outcome.records)],
                "profile": [str(file) for file in traces(outcome.run_dir)],
            }
        )
    else:
        print_report(outcome)
    if finished.exit_code:
        again = short_path(outcome.run_dir)
        print_talk(
            f"stopped at step {finished.steps_done} of {finished.steps}. To "
            f"continue: rlcli resume {again}"
        )
    return finished.exit_code
