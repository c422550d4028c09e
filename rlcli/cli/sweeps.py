"""Sweeps of `rlcli train`: what `--sweep` and `--seeds` run here or submit to Slurm."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlcli.api.run_folder import RESOLVED_RECIPE
from rlcli.cli.arguments import load
from rlcli.cli.compare import print_groups
from rlcli.cli.jobs import refuse_dry_run, tell_script, tell_submitted
from rlcli.cli.output import print_json, print_talk
from rlcli.cli.short_options import tell_recipe
from rlcli.cli.status import as_document
from rlcli.errors import RlcliError, UsageError

if TYPE_CHECKING:
    from rlcli.launch.sweep import Local, Sweep
    from rlcli.observe.run_overview import Overview
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe
    from rlcli.recipe.sweep import SweepRun


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What to sweep, and how to start the runs: the options of `rlcli train`."""

    settings: Sequence[str]
    """`KEY=VALUE,VALUE`, as given with `--sweep`."""
    seeds: int | None
    at_once: int | None
    run_dir: Path | None
    dry_run: bool
    no_check: bool
    as_json: bool


def train_sweep(
    context: typer.Context,
    recipe: str,
    overrides: list[str] | None,
    layers: list[str] | None,
    options: SweepOptions,
) -> int:
    """Run a sweep here, or submit it; returns the exit code. All recipes are checked first."""
    from rlcli.launch.sweep import Sweep, checked_recipes
    from rlcli.recipe.sweep import sweep_runs

    base = _base(context, recipe, overrides, layers, options.settings)
    runs = sweep_runs(options.settings, options.seeds, base.recipe.seed)
    is_repeated = options.seeds is not None  # the seed of the recipe is then that of the first run
    shared = [text for text in overrides or () if not (is_repeated and text.startswith("seed="))]
    sweep = Sweep.from_here(recipe, base.profiles, shared, runs)
    recipes = checked_recipes(sweep)
    is_submitted = base.recipe.launch.type == "slurm"
    if any((recipe.launch.type == "slurm") != is_submitted for recipe in recipes):
        hint = "set launch for all runs, or start a sweep for each value"
        raise UsageError("a sweep is submitted or runs here, as a whole", where="launch", hint=hint)
    if is_submitted:
        return _submit(sweep, base, recipes, options)
    refuse_dry_run(options.dry_run)
    local = _on_this_machine(sweep, base, recipes, options)
    code = local.run()
    _tell_end(local, code, options.as_json)
    return code


def _base(
    context: typer.Context,
    recipe: str,
    overrides: list[str] | None,
    layers: list[str] | None,
    settings: Sequence[str],
) -> Resolved:
    """The recipe without what is swept; that of the first run where it needs that."""
    from rlcli.recipe.sweep import sweep_runs

    first = sweep_runs(settings, seeds=None, first_seed=0)[0]
    try:
        base = load(recipe, overrides, layers)
    except RlcliError:
        return load(recipe, [*(overrides or ()), *first.settings], layers)
    tell_recipe(base, context)
    return base


def _submit(sweep: Sweep, base: Resolved, recipes: Sequence[Recipe], options: SweepOptions) -> int:
    """Submit a sweep as one array of jobs."""
    from rlcli.launch.slurm.submit import planned_sweep, submit_sweep

    batch = planned_sweep(base, sweep, recipes, options.run_dir, options.at_once)
    if options.dry_run:
        return tell_script(batch, options.as_json)
    warn = None if options.no_check else print_talk
    job_id = submit_sweep(batch, sweep, base, warn=warn)
    return tell_submitted(job_id, batch.folder, batch.runs, options.as_json)


def _on_this_machine(
    sweep: Sweep, base: Resolved, recipes: Sequence[Recipe], options: SweepOptions
) -> Local:
    """A sweep with its folder, about to run here."""
    from rlcli.launch.sweep import Local, first_goes_alone, open_sweep, slots
    from rlcli.observe.run_directory import fresh_folder
    from rlcli.observe.terminal import short_path

    log_dir = Path(base.recipe.log.dir).expanduser()
    goes_first = first_goes_alone(base, str(log_dir))
    shares = slots(recipes, options.at_once)
    folder = options.run_dir or fresh_folder(log_dir / base.recipe.name)
    open_sweep(folder, sweep)
    name = short_path(folder)
    print_talk(f"{len(sweep.runs)} runs -> {name}; rlcli status --runs {shlex.quote(name)}")
    is_checked = not options.no_check
    return Local(sweep, folder, shares, print_talk, goes_first, is_checked)


def _tell_end(local: Local, code: int, as_json: bool) -> None:
    """Print how the runs of a sweep ended, and the command to type next."""
    from rlcli.launch.sweep import again
    from rlcli.observe.terminal import short_path

    overviews = local.overviews()
    if as_json:
        runs = [_run_as_document(run, overview) for run, overview in overviews]
        print_json({"ok": code == 0, "exit_code": code, "sweep": str(local.folder), "runs": runs})
    else:
        _print_results([overview.folder for _, overview in overviews if overview is not None])
    name = short_path(local.folder)
    if code == 0:
        print_talk(f"curves: rlcli compare {shlex.quote(name)}")
    else:
        print_talk(f"to continue: {again(Path(name), sys.argv[1:])}")


def _run_as_document(run: SweepRun, overview: Overview | None) -> dict[str, Any]:
    document = {"name": run.name, "settings": run.settings}
    return document if overview is None else document | as_document(overview)


def _print_results(runs: Sequence[Path]) -> None:
    """Print a table of the runs that have begun."""
    from rlcli.observe.group_comparison import groups_of

    begun = [run for run in runs if (run / RESOLVED_RECIPE).is_file()]
    if begun:
        print_groups(groups_of(begun))
