"""Drives a run to its end: its workers and its master, again from a checkpoint if workers die."""

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
from rlcli.errors import DataError, HangError, RlcliError, Stopped, WorkerError
from rlcli.failpoints import check_failpoints
from rlcli.launch import lifeline
from rlcli.launch.last_checkpoint import last_checkpoint, verified_checkpoint
from rlcli.launch.meeting import remove_abandoned
from rlcli.launch.mirrors import Mirrors
from rlcli.launch.recipe_record import record_choices
from rlcli.launch.stopping import StopSignals
from rlcli.launch.workers import workers

if TYPE_CHECKING:
    from rlcli.checkpoint.run_state import Start
    from rlcli.observe.display import Display
    from rlcli.observe.report import RunOutcome
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.observe.setup_times import SetupTimes
    from rlcli.recipe.measured_arguments import Choice
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


def drive(
    recipe: Recipe,
    run: RunDirectory,
    display: Display,
    stop: StopSignals,
    *,
    recipe_digest: Callable[[int], str],
    start: Start | None = None,
    title: str = STEP,
    write_down: Callable[[Start | None], None] | None = None,
) -> Finished:
    """Run to the end, from a checkpoint if there is a `start`; workers that die are replaced while
    restarts are left.

    The ranks verify the checkpoint first; if it is damaged, the run continues from an earlier one.
    `recipe_digest` says the recipe's digest for the step that is continued from. `write_down` is
    called with the checkpoint that is continued from, once the workers are up and have loaded data
    and state. If anything fails before that, a run that is being resumed stays as it was, its
    status included, unless it is a job.
    """
    from rlcli.observe.setup_times import SetupTimes, usual_times

    times = SetupTimes(display, usual_times(run.path))
    with heard_by(times), Mirrors(run.path, recipe.log.trackers, display) as mirrors:
        return _Drive(
            recipe, run, display, stop, recipe_digest, start, title, write_down, times, mirrors
        ).to_the_end()


@dataclass
class _Drive:
    """A run that is being driven."""

    recipe: Recipe
    """With the choices that its ranks have measured, once they have."""
    run: RunDirectory
    display: Display
    stop: StopSignals
    recipe_digest: Callable[[int], str]
    start: Start | None
    """The checkpoint that the next attempt begins with."""
    title: str
    write_down: Callable[[Start | None], None] | None
    times: SetupTimes
    mirrors: Mirrors

    def __post_init__(self) -> None:
        self._has_begun = self.write_down is None

    def to_the_end(self) -> Finished:
        is_job = self.recipe.launch.type == "slurm"  # nobody is watching its terminal
        with _status_of_failures(self.recipe, self.run, lambda: self._has_begun or is_job):
            restarts = self.recipe.launch.max_restarts
            lifeline.report(
                run=str(self.run.path),
                begun=self._has_begun,
                warm_start=self.title != STEP,
                max_restarts=restarts,
            )
            check_failpoints()
            remove_abandoned()
            for attempt in range(restarts):
                try:
                    return self._attempt()
                except (WorkerError, HangError) as error:
                    if self.stop():
                        raise
                    self.display.warning(
                        f"{error}\nstarting the workers again, restart {attempt + 1} of {restarts}"
                    )
                self.start = last_checkpoint(self.run, self.display)
            return self._attempt()

    def _attempt(self) -> Finished:
        """Start the workers and the master and let them run to the end."""
        from rlcli.checkpoint.completion import RunIdentity
        from rlcli.observe.outputs import open_outputs
        from rlcli.runtime.master import MasterWorker
        from rlcli.topology import plan_topology

        recipe, run, display = self.recipe, self.run, self.display
        topology = plan_topology(recipe)
        with workers(recipe, topology, run.path) as running:
            self.stop.also_heed(running.stop_signal)
            start = verified_checkpoint(self.start, running, recipe, topology, run, display)
            done = start.state.step if start is not None else 0
            identity = RunIdentity(run.run_id, self.recipe_digest(done), __version__)
            master = MasterWorker(
                recipe,
                topology,
                running.transport,
                run,
                display,
                identity,
                start,
                self.stop,
                self.title,
            )
            master.start()
            self._begin(start, master.choices)
            began = time.monotonic()
            with open_outputs(run, display.warning) as outputs:
                master.run(outputs)
            seconds = time.monotonic() - began
            master.shut_down()
        return self._end(master.steps_done, master.steps, done, seconds)

    def _end(self, done: int, steps: int, before: int, seconds: float) -> Finished:
        """`done`: of the `steps` of the run; `before`: of these, before this attempt, whose steps
        took so many `seconds`."""
        code = 0 if done == steps else self.stop.exit_code
        self.run.write_status("stopped" if code else "done", done, steps, code)
        outcome = outcome_of(self.recipe, self.run, seconds, before)
        _draw_curves(self.recipe, self.run)
        return Finished(outcome, code, done, steps, before)

    def _begin(self, start: Start | None, choices: Sequence[Choice]) -> None:
        """The workers are up and have loaded data, and the state of `start`."""
        from rlcli.observe.setup_times import FILE
        from rlcli.recipe.measured_arguments import with_choices

        step = start.state.step if start is not None else -1
        if self.start is not None and not self._has_begun:
            self._name_lost_records(step)
        self._forget_after(step)
        if self.write_down is not None and not self._has_begun:
            self.write_down(start)
        self.recipe = with_choices(self.recipe, choices)
        if choices:
            record_choices(self.run, choices, self.display)
        self._has_begun = True
        self.run.write_text(FILE, self.times.end())
        lifeline.report(begun=True)
        self.mirrors.start()

    def _name_lost_records(self, step: int) -> None:
        if lost := self.run.absent_records():
            self.display.warning(
                f"  {' and '.join(lost)} of steps 1 to {step}: missing; the run continues "
                "without them"
            )

    def _forget_after(self, step: int) -> None:
        """Remove what steps have recorded that will be repeated."""
        from rlcli.disk_errors import explain_disk_errors

        for dropped in self.run.forget_after(step):
            say = self.display.warning if dropped.unreadable else self.display.note
            say(f"  {dropped}; the steps after {max(step, 0)} are repeated")
        if step >= 0:
            with explain_disk_errors(self.run.path):
                self.run.record.update(step=step)


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


def outcome_of(
    recipe: Recipe, run: RunDirectory, seconds: float | None = None, began_after: int = 0
) -> RunOutcome:
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
        began_after=began_after,
        models={role: run.model(role) for role in recipe.saved_roles},
        samples=_read_or_warn(changed_responses, run.samples),
    )


def _read_or_warn(read: Callable[[Path], list[Any]], file: Path) -> list[Any]:
    try:
        return read(file)
    except (DataError, OSError) as error:
        log.warning("the report leaves out %s: %s", file.name, error)
        return []
