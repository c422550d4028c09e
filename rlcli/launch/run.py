"""Runs a resolved recipe: its warm starts first, then its workers and its master,
then the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.headway import doing, heard_by
from rlcli.errors import ModelError, NoWholeCheckpoint, ResourceError
from rlcli.inspect.before_start import check_before_start
from rlcli.launch import lifeline
from rlcli.launch.drive import STEP, Finished, drive
from rlcli.launch.last_checkpoint import last_checkpoint
from rlcli.launch.recipe_record import write_recipe
from rlcli.launch.stopping import StopSignals
from rlcli.observe.results import digest, find_interrupted, find_result, runs_first

if TYPE_CHECKING:
    from rlcli.checkpoint.run_state import Start
    from rlcli.observe.display import Display
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe


def run_recipe(
    resolved: Resolved,
    run_dir: Path | None,
    display: Display,
    command: Sequence[str] | None = None,
    *,
    check_rows: bool = False,
) -> Finished:
    """Run a recipe, after the recipes that it starts from; `check_rows`: check some rows of each
    first. Raises RlcliError."""
    log_dir = str(Path(resolved.recipe.log.dir).expanduser())
    with heard_by(display):
        with doing("checking rows and files"):
            check_before_start(
                resolved,
                run_dir,
                runs_first(resolved, log_dir),
                display.warning if check_rows else None,
                display.note,
            )
        with StopSignals(display.warning) as stop:
            recipe, stopped = with_warm_starts(resolved, log_dir, display, stop)
            if stopped is not None:
                return stopped
            return _run_one(resolved, recipe, run_dir, log_dir, display, stop, command=command)


def prepare_run(resolved: Resolved, run_dir: Path) -> None:
    """Create the folder of a run that a job will execute. Missing results of warm starts are
    produced in the job. Raises RlcliError."""
    from rlcli.observe.run_directory import RunDirectory

    recipe, log_dir = resolved.recipe, str(Path(resolved.recipe.log.dir).expanduser())
    with RunDirectory.create(run_dir, recipe.name) as run:
        write_recipe(run, resolved, _with_results(resolved, log_dir), digest(resolved))
        run.write_status("submitted", 0, None)


def _with_results(resolved: Resolved, log_dir: str) -> Recipe:
    """The recipe with `recipe:…` paths replaced by folders, where these exist."""
    from rlcli.recipe.warm_start import warm_starts

    models = dict(resolved.recipe.models)
    for start in warm_starts(resolved):
        if (folder := find_result(start.source, log_dir, start.source_role)) is not None:
            models[start.role] = models[start.role].model_copy(update={"path": str(folder)})
    return resolved.recipe.model_copy(update={"models": models})


def with_warm_starts(
    resolved: Resolved, log_dir: str, display: Display, stop: StopSignals
) -> tuple[Recipe, Finished | None]:
    """The recipe with `recipe:…` paths replaced by folders;
    recipes whose results are missing are run first."""
    from rlcli.recipe.warm_start import warm_starts

    models = dict(resolved.recipe.models)
    for start in warm_starts(resolved):
        folder = find_result(start.source, log_dir, start.source_role)
        if folder is None:
            display.note(
                f"{resolved.recipe.name} needs the model from {start.source.recipe.name}; training "
                f"that first. To use an existing model: models.{start.role}.path=FOLDER"
            )
            source, stopped = with_warm_starts(start.source, log_dir, display, stop)
            finished = stopped or _run_first(start.source, source, log_dir, display, stop)
            if finished.exit_code:
                return resolved.recipe, finished
            folder = finished.outcome.models[start.source_role]
        else:
            display.note(f"starting from {folder}")
        models[start.role] = models[start.role].model_copy(update={"path": str(folder)})
    return resolved.recipe.model_copy(update={"models": models}), None


def _run_first(
    resolved: Resolved, recipe: Recipe, log_dir: str, display: Display, stop: StopSignals
) -> Finished:
    """Run a recipe whose result another one starts from,
    or continue a run of it that was interrupted."""
    from rlcli.recipe.measured_arguments import with_choices_of
    from rlcli.recipe.parsing.finding import shown
    from rlcli.recipe.resolve import load_recipe

    title, folder = f"warm start {recipe.name}", find_interrupted(resolved, log_dir)
    if folder is not None and (interrupted := _reopened(folder, display)) is not None:
        run, start = interrupted
        display.note(
            f"continuing {shown(run.path)}, which was interrupted, after step {start.state.step}"
        )
        try:
            with run:
                before = load_recipe(str(run.resolved_recipe), ()).recipe
                return drive(
                    with_choices_of(before, recipe),
                    run,
                    display,
                    stop,
                    recipe_digest=lambda step: digest(resolved),
                    start=start,
                    title=title,
                    write_down=lambda start: run.note_resume(start.state.step if start else 0),
                )
        except NoWholeCheckpoint as error:
            display.warning(f"{error}\nstarting over in a new folder")
    command = ("rlcli", "train", shown(resolved.path))
    return _run_one(resolved, recipe, None, log_dir, display, stop, title=title, command=command)


def _reopened(folder: Path, display: Display) -> tuple[RunDirectory, Start] | None:
    """An interrupted run and its last checkpoint; None if another process continues it, or no
    checkpoint is whole."""
    from rlcli.observe.run_directory import RunDirectory

    try:
        run = RunDirectory.reopen(folder, lifeline.supervisor)
    except ResourceError:
        return None
    try:
        start = last_checkpoint(run, display)
    except ModelError as error:
        display.warning(f"{error}\nstarting over in a new folder")
        start = None
    if start is None:
        run.close()
        return None
    return run, start


def _run_one(
    resolved: Resolved,
    recipe: Recipe,
    run_dir: Path | None,
    log_dir: str,
    display: Display,
    stop: StopSignals,
    *,
    title: str = STEP,
    command: Sequence[str] | None = None,
) -> Finished:
    from rlcli.observe.run_directory import RunDirectory

    with RunDirectory.create(run_dir, recipe.name, log_dir, command, lifeline.supervisor) as run:
        recipe_digest = digest(resolved)
        write_recipe(run, resolved, recipe, recipe_digest)
        return drive(
            recipe, run, display, stop, recipe_digest=lambda step: recipe_digest, title=title
        )
