"""Runs a resolved recipe: its warm starts first, then its workers and its master,
then the results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli import __version__
from rlcli.api.headway import doing, heard_by
from rlcli.errors import (
    DataError,
    HangError,
    ModelError,
    NoWholeCheckpoint,
    ResourceError,
    RlcliError,
    Stopped,
    WorkerError,
)
from rlcli.failpoints import check_failpoints
from rlcli.inspect.before_start import check_before_start
from rlcli.launch import lifeline
from rlcli.launch.last_checkpoint import last_checkpoint, verified_checkpoint
from rlcli.launch.meeting import remove_abandoned
from rlcli.launch.mirrors import Mirrors
from rlcli.launch.recipe_record import record_choices, write_recipe
from rlcli.launch.stopping import StopSignals
from rlcli.launch.workers import workers
from rlcli.observe.results import digest, find_interrupted, find_result, runs_first

if TYPE_CHECKING:
    from rlcli.checkpoint.run_state import Start
    from rlcli.observe.display import Display
    from rlcli.observe.report import RunOutcome
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.recipe.measured import Choice
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe

log = logging.getLogger(__name__)

STEP = "step"
"""The display's word for the steps of the requested run; those of a warm start go by its name."""


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    outcome: RunOutcome
    exit_code: int
    steps_done: int
    steps: int
    began_after: int = 0
    """The step of the checkpoint that it continued from."""


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
    from rlcli.recipe.parsing.layers import shown

    title, folder = f"warm start {recipe.name}", find_interrupted(resolved, log_dir)
    if folder is not None and (interrupted := _reopened(folder, display)) is not None:
        run, start = interrupted
        display.note(
            f"continuing {shown(run.path)}, which was interrupted, after step {start.state.step}"
        )
        try:
            with run:
                return drive(
                    recipe,
                    run,
                    display,
                    stop,
                    recipe_digest=lambda step: digest(resolved),
                    start=start,
                    title=title,
                    write_down=run.note_resume,
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


def drive(
    recipe: Recipe,
    run: RunDirectory,
    display: Display,
    stop: StopSignals,
    *,
    recipe_digest: Callable[[int], str],
    start: Start | None = None,
    title: str = STEP,
    write_down: Callable[[int], None] | None = None,
) -> Finished:
    """Run to the end, from a checkpoint if there is a `start`; workers that die are replaced while
    restarts are left.

    The ranks verify the checkpoint first; if it is damaged, the run continues from an earlier one.
    `recipe_digest` says the recipe's digest for the step that is continued from. `write_down` is
    called with that step once the workers are up and have loaded data and state. If anything fails
    before that, a run that is being resumed stays as it was, its status included,
    unless it is a job.
    """
    from rlcli.disk_errors import explain_disk_errors
    from rlcli.observe.setup_times import FILE, SetupTimes, usual_times
    from rlcli.recipe.measured import with_choices

    has_begun = write_down is None
    times = SetupTimes(display, usual_times(run.path))

    def begin(step: int, choices: Sequence[Choice]) -> None:
        nonlocal has_begun, recipe
        if start is not None and not has_begun and (absent := run.absent_records()):
            display.warning(
                f"  {' and '.join(absent)} of steps 1 to {step}: missing; the run continues "
                "without them"
            )
        for dropped in run.forget_after(step):
            say = display.warning if dropped.unreadable else display.note
            say(f"  {dropped}; the steps after {max(step, 0)} are repeated")
        if step >= 0:
            with explain_disk_errors(run.path):
                run.record.update(step=step)
        if write_down is not None and not has_begun:
            write_down(max(step, 0))
        recipe = with_choices(recipe, choices)
        if choices:
            record_choices(run, choices, display)
        has_begun = True
        run.write_text(FILE, times.end())
        lifeline.report(begun=True)
        mirrors.start()

    is_job = recipe.launch.type == "slurm"  # nobody is watching its terminal
    with (
        heard_by(times),
        Mirrors(run.path, recipe.log.trackers, display) as mirrors,
        _status_of_failures(recipe, run, lambda: has_begun or is_job),
    ):
        warm_start, restarts = title != STEP, recipe.launch.max_restarts
        lifeline.report(
            run=str(run.path), begun=has_begun, warm_start=warm_start, max_restarts=restarts
        )
        check_failpoints()
        remove_abandoned()
        for attempt in range(restarts + 1):
            try:
                return _attempt(recipe, run, display, stop, recipe_digest, start, title, begin)
            except (WorkerError, HangError) as error:
                if attempt == restarts or stop():
                    raise
                display.warning(
                    f"{error}\nstarting the workers again, restart {attempt + 1} of {restarts}"
                )
            start = last_checkpoint(run, display)
    raise AssertionError("a run ends or raises")


def _attempt(
    recipe: Recipe,
    run: RunDirectory,
    display: Display,
    stop: StopSignals,
    recipe_digest: Callable[[int], str],
    start: Start | None,
    title: str,
    begin: Callable[[int, Sequence[Choice]], None],
) -> Finished:
    """Start a run's workers and master and let them run to the end; once they are ready,
    `begin(step, choices)` is called with what they have measured."""
    from rlcli.checkpoint.completion import RunIdentity
    from rlcli.observe.outputs import open_outputs
    from rlcli.runtime.master import MasterWorker
    from rlcli.topology import plan_topology

    began = time.monotonic()
    topology = plan_topology(recipe)
    with workers(recipe, topology, run.path) as running:
        stop.also_heed(running.stop_signal)
        start = verified_checkpoint(start, running, recipe, topology, run, display)
        done = start.state.step if start is not None else 0
        identity = RunIdentity(run.run_id, recipe_digest(done), __version__)
        master = MasterWorker(
            recipe, topology, running.transport, run, display, identity, start, stop, title
        )
        master.start()
        begin(start.state.step if start is not None else -1, master.choices)
        with open_outputs(run, display.warning) as outputs:
            master.run(outputs)
        master.shut_down()
    code = 0 if master.steps_done == master.steps else stop.exit_code
    run.write_status("stopped" if code else "done", master.steps_done, master.steps, code)
    outcome = outcome_of(recipe, run, time.monotonic() - began)
    _draw_curves(recipe, run)
    return Finished(outcome, code, master.steps_done, master.steps, done)


@contextmanager
def _status_of_failures(
    recipe: Recipe, run: RunDirectory, has_begun: Callable[[], bool]
) -> Iterator[None]:
    """Write failures to status.json, which is the authority on how a run ended, and draw the curves
    up to there."""
    try:
        yield
    except BaseException as error:
        if not has_begun():
            raise
        code = error.exit_code if isinstance(error, RlcliError) else 1
        if isinstance(error, KeyboardInterrupt):
            code = 130
        run.write_failure(code, str(error))
        if isinstance(error, RlcliError) and not isinstance(error, Stopped):
            _draw_curves(recipe, run)
        raise


def _draw_curves(recipe: Recipe, run: RunDirectory) -> None:
    """Draw the curves of a run that has ended, however it ended."""
    from rlcli.observe.metrics import read_metrics
    from rlcli.observe.plot import plot_curves

    if recipe.log.plot and run.metrics.exists():
        title = f"{recipe.name}/{run.path.name}"
        with doing("drawing the curves"):
            plot_curves(_read_or_warn(read_metrics, run.metrics), run.curve, title)


def outcome_of(recipe: Recipe, run: RunDirectory, seconds: float | None = None) -> RunOutcome:
    """The results of a run that has ended. Files that cannot be read are left out, with a warning:
    other code has written to them, and the models are not affected."""
    from rlcli.observe.metrics import read_metrics
    from rlcli.observe.report import RunOutcome
    from rlcli.observe.samples import changed_responses

    return RunOutcome(
        recipe=recipe.name,
        run_dir=run.path,
        records=_read_or_warn(read_metrics, run.metrics),
        seconds=seconds,
        models={role: run.model(role) for role in recipe.saved_roles},
        samples=_read_or_warn(changed_responses, run.samples),
    )


def _read_or_warn(read: Callable[[Path], list[Any]], file: Path) -> list[Any]:
    try:
        return read(file)
    except (DataError, OSError) as error:
        log.warning("the report leaves out %s: %s", file.name, error)
        return []
