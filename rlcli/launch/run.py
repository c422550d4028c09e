"""Runs a resolved recipe: its warm starts first, then its workers and its master, then the results."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli import __version__
from rlcli.errors import DataError, HangError, ModelError, ResourceError, RlcliError, WorkerError
from rlcli.failpoints import check_failpoints
from rlcli.inspect.before_start import check_before_start
from rlcli.launch import lifeline
from rlcli.launch.meeting import remove_abandoned
from rlcli.launch.memory_kills import write_estimate
from rlcli.launch.stacks import where_ranks_are
from rlcli.launch.stopping import StopSignals
from rlcli.observe.results import DIGEST_FILE, digest, find_interrupted, find_result, runs_first
from rlcli.topology.groups import process_groups

if TYPE_CHECKING:
    from rlcli.checkpoint.verify import Checkpoint
    from rlcli.launch.launcher import Launcher, Running
    from rlcli.observe.display import Display
    from rlcli.observe.report import Outcome
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe
    from rlcli.runtime.checkpoints import Start
    from rlcli.runtime.commits import RunIdentity
    from rlcli.topology import Topology

log = logging.getLogger(__name__)

STARTS = "starts.json"
STEP = "step"
"""The display's word for the steps of the requested run; those of a warm start go by its name."""
LEAVE_WITHIN = 60.0
"""Seconds that dismissed processes may take to exit."""


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    outcome: Outcome
    exit_code: int
    steps_done: int
    steps: int


def run_recipe(
    resolved: Resolved, run_dir: Path | None, display: Display, command: Sequence[str] | None = None, *,
    check_rows: bool = False,
) -> Finished:  # fmt: skip
    """Run a recipe, after the recipes that it starts from; `check_rows`: check some rows of each first. Raises
    RlcliError."""
    log_dir = str(Path(resolved.recipe.log.dir).expanduser())
    check_before_start(resolved, run_dir, runs_first(resolved, log_dir), display.warning if check_rows else None)
    with StopSignals(display.warning) as stop:
        recipe, stopped = with_warm_starts(resolved, log_dir, display, stop)
        if stopped is not None:
            return stopped
        return _run_one(resolved, recipe, run_dir, log_dir, display, stop, command=command)


def prepare_run(resolved: Resolved, run_dir: Path) -> None:
    """Create the folder of a run that a job will execute. Missing results of warm starts are produced in the job.
    Raises RlcliError."""
    from rlcli.observe.run_directory import RunDirectory

    recipe, log_dir = resolved.recipe, str(Path(resolved.recipe.log.dir).expanduser())
    with RunDirectory.create(run_dir, recipe.name) as run:
        _write_down(run, resolved, _with_results(resolved, log_dir), digest(resolved))
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
    """The recipe with `recipe:…` paths replaced by folders; recipes whose results are missing are run first."""
    from rlcli.recipe.warm_start import warm_starts

    models = dict(resolved.recipe.models)
    for start in warm_starts(resolved):
        folder = find_result(start.source, log_dir, start.source_role)
        if folder is None:
            display.note(
                f"{resolved.recipe.name} needs the model from {start.source.recipe.name}; training that first. "
                f"To use an existing model: models.{start.role}.path=FOLDER"
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


def _run_first(resolved: Resolved, recipe: Recipe, log_dir: str, display: Display, stop: StopSignals) -> Finished:
    """Run a recipe whose result another one starts from, or continue a run of it that was interrupted."""
    from rlcli.recipe.parsing.layers import shown

    title, folder = f"warm start {recipe.name}", find_interrupted(resolved, log_dir)
    interrupted = _reopened(folder, display) if folder is not None else None
    if interrupted is None:
        command = ("rlcli", "train", shown(resolved.path))
        return _run_one(resolved, recipe, None, log_dir, display, stop, title=title, command=command)
    run, start = interrupted
    with run:
        step = start.state.step
        display.note(f"continuing {shown(run.path)}, which was interrupted, after step {step}")
        return drive(
            recipe, run, display, stop, recipe_digest=digest(resolved), start=start, title=title,
            write_down=lambda: run.note_resume(step),
        )  # fmt: skip


def _reopened(folder: Path, display: Display) -> tuple[RunDirectory, Start] | None:
    """An interrupted run and its last checkpoint; None if another process continues it, or no checkpoint is whole."""
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
        _write_down(run, resolved, recipe, recipe_digest)
        return drive(recipe, run, display, stop, recipe_digest=recipe_digest, title=title)


def drive(
    recipe: Recipe, run: RunDirectory, display: Display, stop: StopSignals, *, recipe_digest: str,
    start: Start | None = None, title: str = STEP, write_down: Callable[[], None] | None = None,
) -> Finished:  # fmt: skip
    """Run to the end, from a checkpoint if there is a `start`; workers that die are replaced while restarts are left.

    `write_down` is called once the workers are up and have loaded data and state. If anything fails before that, a
    run that is being resumed stays as it was, its status included, unless it is a job.
    """
    from rlcli.checkpoint.disk import explain_disk_errors
    from rlcli.runtime.commits import RunIdentity

    identity = RunIdentity(run.run_id, recipe_digest, __version__)
    has_begun = write_down is None

    def begin(step: int) -> None:
        nonlocal has_begun
        for dropped in run.forget_after(step):
            say = display.warning if dropped.unreadable else display.note
            say(f"  {dropped}; the steps after {max(step, 0)} are repeated")
        if step >= 0:
            with explain_disk_errors(run.path):
                run.record.update(step=step)
        if write_down is not None and not has_begun:
            write_down()
        has_begun = True
        lifeline.report(begun=True)

    is_job = recipe.launch.type == "slurm"  # nobody is watching its terminal
    with _status_of_failures(run, lambda: has_begun or is_job):
        warm_start, restarts = title != STEP, recipe.launch.max_restarts
        lifeline.report(run=str(run.path), begun=has_begun, warm_start=warm_start, max_restarts=restarts)
        check_failpoints()
        remove_abandoned()
        for attempt in range(restarts + 1):
            try:
                return _attempt(recipe, run, display, stop, identity, start, title, begin)
            except (WorkerError, HangError) as error:
                if attempt == restarts or stop():
                    raise
                display.warning(f"{error}\nstarting the workers again, restart {attempt + 1} of {restarts}")
            start = last_checkpoint(run, display)
    raise AssertionError("a run ends or raises")


def last_checkpoint(run: RunDirectory, display: Display) -> Start | None:
    """The newest checkpoint that is whole, and a warning for each newer one that is not; None if there is none yet.

    Raises ModelError if checkpoints exist but none is whole, or F21 if one was committed and there is none now:
    training progress must not be discarded silently.
    """
    from rlcli.checkpoint.disk import check_writable
    from rlcli.checkpoint.verify import newest_verified
    from rlcli.runtime.checkpoints import RunState, Start

    checkpoint: Checkpoint | None = None
    rejected: list[ModelError] = []
    if os.path.lexists(run.checkpoints):
        check_writable(run.checkpoints)  # it may be a link to a disk that is missing or read-only
        checkpoint, rejected = newest_verified(run.checkpoints, run.run_id)
    for one in rejected:
        display.warning(f"[{one.code}] {one.where}: {one.what}")
    if checkpoint is not None:
        last = run.record.step
        if last is not None and last > checkpoint.manifest.step and not rejected:
            display.warning(f"[F21] {run.checkpoints}: the last checkpoint, of step {last}, is missing")
        return Start(checkpoint.path, RunState.read(checkpoint.path))
    code, committed = "F21", last_committed(run)
    if rejected:
        code, what = rejected[0].code, "no checkpoint is whole"
    elif committed is not None:
        what = f"step {committed} was committed, but there is no checkpoint now"
    elif run.record.is_lost:
        what = "there is no checkpoint, and committed.json, which says whether there was one, is gone or cannot be read"
    else:
        return None
    hint = f"put it back; or start over in a new folder: rlcli train {shlex.quote(str(run.resolved_recipe))}"
    raise ModelError(what, where=str(run.checkpoints), hint=hint, code=code)


def last_committed(run: RunDirectory) -> int | None:
    """The last step that was committed, wherever the checkpoints are now; None if there was none yet."""
    from rlcli.checkpoint.retention import latest_step

    resumed = [step for entry in run.read_resumes() if isinstance(step := entry.get("step"), int) and step > 0]
    known = [run.record.step, latest_step(run.checkpoints), *resumed]
    return max((step for step in known if step is not None), default=None)


def _attempt(
    recipe: Recipe, run: RunDirectory, display: Display, stop: StopSignals, identity: RunIdentity,
    start: Start | None, title: str, begin: Callable[[int], None],
) -> Finished:  # fmt: skip
    """Start a run's workers and master and let them run to the end; `begin(step)` is called once they are ready."""
    from rlcli.observe.plot import plot_curves
    from rlcli.runtime.master import MasterWorker
    from rlcli.runtime.outputs import open_outputs
    from rlcli.topology import plan_topology

    began = time.monotonic()
    topology = plan_topology(recipe)
    with workers(recipe, topology, run.path) as running:
        stop.also_heed(running.stop_signal)
        master = MasterWorker(recipe, topology, running.transport, run, display, identity, start, stop, title)
        master.start()
        begin(start.state.step if start is not None else -1)
        with open_outputs(run, recipe.log.tensorboard, display.warning) as outputs:
            master.run(outputs)
        master.shut_down()
    code = 0 if master.steps_done == master.steps else stop.exit_code
    run.write_status("stopped" if code else "done", master.steps_done, master.steps, code)
    outcome = outcome_of(recipe, run, time.monotonic() - began)
    if recipe.log.plot:
        plot_curves(outcome.records, run.curve, recipe.name)
    return Finished(outcome, code, master.steps_done, master.steps)


def _write_down(run: RunDirectory, resolved: Resolved, recipe: Recipe, recipe_digest: str) -> None:
    """Write the recipe as given and as resolved, and the origin of each value. Once the last file is written, the run
    can be resumed."""
    for layer in resolved.layers:
        run.write_text(Path("recipe") / layer.label, layer.text)
    if resolved.overrides:
        run.write_text(Path("recipe") / "overrides.txt", "\n".join(resolved.overrides) + "\n")
    run.write_text("origins.json", json.dumps(resolved.origins, indent=2) + "\n")
    write_starts(run, recipe)
    run.write_text(DIGEST_FILE, recipe_digest + "\n")
    write_estimate(run, resolved)
    run.write_text(run.resolved_recipe.name, resolved.to_yaml())


def write_starts(run: RunDirectory, recipe: Recipe) -> None:
    """Write what each role starts from."""
    starts = {name: role.path for name, role in recipe.models.items() if role.path}
    run.write_text(STARTS, json.dumps(starts, indent=2) + "\n")


@contextmanager
def _status_of_failures(run: RunDirectory, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Write failures to status.json, which is the authority on how a run ended."""
    try:
        yield
    except BaseException as error:
        if not has_begun():
            raise
        code = error.exit_code if isinstance(error, RlcliError) else 1
        if isinstance(error, KeyboardInterrupt):
            code = 130
        run.write_failure(code, str(error))
        raise


@contextmanager
def workers(recipe: Recipe, topology: Topology, run_dir: Path) -> Iterator[Running]:
    """Workers of a recipe, in this process or in others that log to the run's folder."""
    running = launcher_of(recipe, topology).start(process_groups(recipe, topology), run_dir)
    try:
        yield running
    except HangError as error:
        running.stop(0, show_stacks=True)
        if more := where_ranks_are(run_dir / "logs", range(topology.world_size)):
            raise HangError(error.what + more, where=error.where, hint=error.hint, code=error.code) from error
        raise
    except BaseException:
        running.stop(0)
        raise
    running.stop(LEAVE_WITHIN)


def launcher_of(recipe: Recipe, topology: Topology) -> Launcher:
    if recipe.launch.type == "inline":
        from rlcli.launch.inline import InlineLauncher

        return InlineLauncher(recipe, topology)
    if recipe.launch.type == "slurm":
        from rlcli.launch.slurm.launcher import SlurmLauncher

        return SlurmLauncher(recipe)
    from rlcli.launch.local import LocalLauncher

    return LocalLauncher(recipe)


def outcome_of(recipe: Recipe, run: RunDirectory, seconds: float | None = None) -> Outcome:
    """The results of a run that has ended. Files that cannot be read are left out, with a warning: other code has
    written to them, and the models are not affected."""
    from rlcli.observe.metrics import read_metrics
    from rlcli.observe.report import Outcome
    from rlcli.observe.samples import changed_responses

    return Outcome(
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
