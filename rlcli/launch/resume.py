"""Resumes a run from its last verified checkpoint, with its own recipe or a changed one."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yaml import YAMLError

from rlcli.api.headway import heard_by
from rlcli.errors import ResourceError, RlcliError, UsageError, raise_all
from rlcli.files import known_object, read_text
from rlcli.launch import lifeline
from rlcli.launch.drive import Finished, drive, outcome_of
from rlcli.launch.last_checkpoint import last_checkpoint, last_committed
from rlcli.launch.recipe_record import STARTS, write_starts
from rlcli.launch.run import with_warm_starts
from rlcli.launch.slurm.jobs import Submission
from rlcli.launch.stopping import StopSignals
from rlcli.launch.working_folder import in_its_folder
from rlcli.observe.results import DIGEST_FILE, digest, recorded_digest
from rlcli.project import check_run_not_planted

if TYPE_CHECKING:
    from rlcli.checkpoint.run_state import Start
    from rlcli.observe.display import Display
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.recipe.changes_on_resume import Change
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe

log = logging.getLogger(__name__)

WITHOUT_EFFECT = ("cluster", "launch", "checkpoint", "log", "name")
"""Sections that the trained model does not depend on."""


@dataclass(frozen=True)
class Resumed:
    """What a run continued with, and how it ended."""

    step: int
    changes: list[Change]
    finished: Finished
    longer: str | None = None
    """For a run that was already complete: the command that trains longer."""


def resume_run(
    run_dir: Path,
    overrides: Sequence[str],
    display: Display,
    *,
    recipe_file: str | None = None,
    accept_changes: bool = False,
) -> Resumed:
    """Continue a run from its last verified checkpoint, or from its beginning if none was committed
    yet. Raises RlcliError."""
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.recipe.changes_on_resume import longer
    from rlcli.recipe.requirements_here import missing_here

    named = found_from_here(recipe_file)
    check_run_not_planted(run_dir, "resume")
    with (
        heard_by(display),
        RunDirectory.reopen(run_dir, lifeline.supervisor) as run,
        StopSignals(display.warning) as stop,
        in_its_folder(run.path, "resume", display.note),
    ):
        before = _resolved_recipe(run)
        now = _with_choices_of(before, _load(named or str(run.resolved_recipe), overrides))
        raise_all(missing_here(now))
        changes = _accepted_changes(before.recipe, now.recipe, accept_changes)
        start = last_checkpoint(run, display)
        over = _step_if_over(run, changes, start)
        if over is not None:
            if changes:
                display.warning(f"the run is complete; without effect: {_keys(changes)}")
            again = longer(shlex.quote(str(run_dir)), before.recipe)
            return _complete(run, before.recipe, changes, over, again)
        return _continued(run, before, now, changes, start, display, stop)


def _complete(
    run: RunDirectory, recipe: Recipe, changes: list[Change], step: int, longer: str
) -> Resumed:
    """A run with nothing left to do; `longer`: the command that trains longer."""
    lifeline.report(run=str(run.path), over=True)
    finished = Finished(outcome_of(recipe, run), 0, step, step)
    return Resumed(step, changes, finished, longer)


def _continued(
    run: RunDirectory,
    before: Resolved,
    now: Resolved,
    changes: list[Change],
    start: Start | None,
    display: Display,
    stop: StopSignals,
) -> Resumed:
    if now.recipe.launch.type != "slurm":
        Submission.forget(run.path)
    if was_begun := _was_begun(run):
        _say_where(now.recipe, start, display)
    recipe, stopped = _with_starts(run, now, display, stop)
    if stopped is not None:
        return Resumed(start.state.step if start is not None else 0, changes, stopped)
    first_digest = _first_digest(run, before)

    def recipe_digest(step: int) -> str:
        return _digest(first_digest, changes, step)

    def write_down(start: Start | None) -> None:
        step = start.state.step if start is not None else 0
        _write_down(run, now, changes, step, recipe_digest(step))
        _say_what(now.recipe, changes, start, display)

    begins = write_down if was_begun else None
    finished = drive(
        recipe, run, display, stop, start=start, recipe_digest=recipe_digest, write_down=begins
    )
    return Resumed(finished.began_after, changes, finished)


def resumed_recipe(
    run_dir: Path,
    overrides: Sequence[str],
    *,
    recipe_file: str | None = None,
    accept_changes: bool = False,
) -> Recipe:
    """The recipe a run would continue with; the run is not touched. Raises RlcliError, as
    `resume_run` would."""
    from rlcli.observe.run_directory import RunDirectory

    named = found_from_here(recipe_file)
    check_run_not_planted(run_dir, "resume")
    run = RunDirectory.open(run_dir)
    with in_its_folder(run.path, "resume", log.debug):
        before = _resolved_recipe(run)
        now = before
        if named or overrides:
            now = _with_choices_of(before, _load(named or str(run.resolved_recipe), overrides))
        _accepted_changes(before.recipe, now.recipe, accept_changes)
    return now.recipe


def is_complete(run_dir: Path, now: Recipe, display: Display) -> bool:
    """Whether a run that would continue with this recipe has nothing left to do; it is not touched.
    Raises RlcliError, as `resume_run` would."""
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.observe.run_record import read_status
    from rlcli.recipe.changes_on_resume import changes

    run = RunDirectory.open(run_dir)
    if (read_status(run.path) or {}).get("state") != "done":
        return False
    with in_its_folder(run.path, "resume", log.debug):
        changed = changes(_resolved_recipe(run).recipe, now)
        return _step_if_over(run, changed, last_checkpoint(run, display)) is not None


def found_from_here(recipe_file: str | None) -> str | None:
    """Absolute path of a recipe file, resolved in the user's folder and not in the run's;
    a name stays a name."""
    candidates = [Path(recipe_file), Path(f"{recipe_file}.yaml")] if recipe_file else []
    return next((str(path.absolute()) for path in candidates if path.is_file()), recipe_file)


def _resolved_recipe(run: RunDirectory) -> Resolved:
    """The run's resolved recipe. Raises ResourceError F72 if the run was killed before it was
    written, or lost it."""
    if run.resolved_recipe.exists():
        _refuse_older_format(run)
        return _load(str(run.resolved_recipe), ())
    if last_committed(run) is None and not run.metrics.exists():
        message = f"{run.path} holds no run yet: it ended before it had written down its recipe"
        hint = "start it again, with this --run-dir if it is to be here"
        raise ResourceError(message, hint=hint, code="F72")
    message = "it is missing, and the run needs it"
    hint = (
        f"put it back; {run.recipe} has the recipe as it was written, and the "
        "checkpoints are unchanged"
    )
    raise ResourceError(message, where=str(run.resolved_recipe), hint=hint, code="F72")


def _refuse_older_format(run: RunDirectory) -> None:
    """Refuse a run whose calls have changed: its checkpoints hold the states of others. Raises
    UsageError F85."""
    from rlcli.recipe.authoring.migration import migrate

    try:
        changes = migrate(read_text(run.resolved_recipe)).changes
    except (OSError, YAMLError):
        return  # loading it says what is wrong
    except UsageError as error:
        changes = (error.what,)
    if changes:
        raise UsageError(
            (
                f"{run.path} was begun by an older rlcli, whose recipes had format 1. "
                f"Now: {'; '.join(changes)}"
            ),
            hint=(
                "finish it with that version, or migrate its recipe and start a "
                "new run from its models/"
            ),
            code="F85",
        )


def _load(recipe: str, overrides: Sequence[str]) -> Resolved:
    from rlcli.recipe.resolve import load_recipe

    return load_recipe(recipe, overrides)


def _with_choices_of(before: Resolved, now: Resolved) -> Resolved:
    from rlcli.recipe.measured_arguments import with_choices_of

    return replace(now, recipe=with_choices_of(before.recipe, now.recipe))


def _accepted_changes(before: Recipe, now: Recipe, accept: bool) -> list[Change]:
    """Changes to the run's recipe. Raises UsageError F84 for those that are forbidden,
    or that need to be accepted."""
    from rlcli.recipe.changes_on_resume import Kind, changes

    accepted = changes(before, now)
    forbidden = [change for change in accepted if change.kind is Kind.FORBIDDEN]
    if forbidden:
        raise UsageError(
            f"a run cannot be resumed with another {_keys(forbidden)}",
            hint="start a new run; models.<role>.path may name a model that this one has trained",
            code="F84",
        )
    altering = [change for change in accepted if change.kind is Kind.ALTERS]
    if altering and not accept:
        message = "; ".join(f"{c.key}: {_shown(c.before)} → {_shown(c.now)}" for c in altering)
        raise UsageError(
            f"this would change how the rest of the run learns: {message}",
            hint="add --accept-changes if you mean it",
            code="F84",
        )
    return accepted


def _keys(changes: Sequence[Change]) -> str:
    return ", ".join(change.key for change in changes)


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _say_where(now: Recipe, start: Start | None, display: Display) -> None:
    """Show from where the run continues."""
    if start is None:
        display.note("no checkpoint was committed yet: starting from step 0")
        return
    ranks = known_object(start.folder / "MANIFEST.json").get("world_size")
    world = now.cluster.nodes * now.cluster.devices_per_node
    moved = f" (saved on {ranks} ranks, continuing on {world})" if ranks != world else ""
    display.note(f"resuming after step {start.state.step}{moved}")


def _say_what(
    now: Recipe, changes: Sequence[Change], start: Start | None, display: Display
) -> None:
    """Show what was restored, and what is different now."""
    if start is not None:
        roles = ", ".join(
            f"{role} weights" + (" and optimizer" if role in now.trained_roles else "")
            for role in now.changing_roles
        )
        drawn = start.state.drawn
        display.note(
            f"  restored  {roles}, interfaces' state, position {drawn} in the training data"
        )
    for change in changes:
        display.note(f"  changed   {change.key}: {_shown(change.before)} → {_shown(change.now)}")


def _step_if_over(run: RunDirectory, changes: Sequence[Change], start: Start | None) -> int | None:
    """The last step of a run that has done all of them and saved its models, and is not to be
    prolonged. Raises UsageError for one that is, but has no checkpoint to continue from."""
    from rlcli.observe.run_record import read_status

    status = read_status(run.path) or {}
    steps, step = status.get("steps"), start.state.step if start is not None else 0
    if status.get("state") != "done" or steps is None:
        return None
    is_saved = run.record.is_done and step >= (run.record.step or 0)
    if step < steps and not is_saved:  # its last checkpoint is lost
        return None
    if not any(change.key in ("train.steps", "train.epochs") for change in changes):
        return int(steps)
    if start is None:
        raise UsageError(
            f"{run.path} is done, and has no checkpoint from which it could be continued",
            hint="train in a new folder; models.ROLE.path takes a model of this run as a start",
        )
    return None


def _first_digest(run: RunDirectory, recipe: Resolved) -> str:
    """Digest of the recipe that the run has had until now."""
    return recorded_digest(run.path) or digest(recipe)


def _digest(before: str, changes: Sequence[Change], step: int) -> str:
    """Digest of the recipe that the run began with, and of each later change and its step."""
    telling = [
        (change.key, change.now)
        for change in changes
        if change.key.split(".")[0] not in WITHOUT_EFFECT
    ]
    text = json.dumps(telling, sort_keys=True)
    return hashlib.sha256(f"{before} {step} {text}".encode()).hexdigest() if telling else before


def _write_down(
    run: RunDirectory, resolved: Resolved, changes: Sequence[Change], step: int, recipe_digest: str
) -> None:
    """Record what the run continues with, and from which step."""
    run.note_resume(step, [{**vars(change), "kind": change.kind.value} for change in changes])
    if changes:
        run.write_text(DIGEST_FILE, recipe_digest + "\n")
        run.write_text(run.resolved_recipe.name, resolved.to_yaml())


def _was_begun(run: RunDirectory) -> bool:
    """Whether the run had begun before: not if it was only submitted, and its job begins now."""
    from rlcli.observe.run_record import read_status

    status = read_status(run.path) or {}
    return (
        status.get("state") != "submitted"
        or last_committed(run) is not None
        or run.metrics.exists()
    )


def _with_starts(
    run: RunDirectory, now: Resolved, display: Display, stop: StopSignals
) -> tuple[Recipe, Finished | None]:
    """Point roles that start from another recipe's result to the folder it was in. A run that was
    submitted before that result existed produces it first, and is over if that is stopped."""
    starts = known_object(run.path / STARTS)
    models = {
        name: role.model_copy(update={"path": starts[name]})
        if role.warm_start and name in starts
        else role
        for name, role in now.recipe.models.items()
    }
    recipe = now.recipe.model_copy(update={"models": models})
    if not any(role.warm_start for role in models.values()):
        return recipe, None
    log_dir = str(Path(recipe.log.dir).expanduser())
    try:
        recipe, stopped = with_warm_starts(replace(now, recipe=recipe), log_dir, display, stop)
    except RlcliError as error:
        run.write_failure(error.exit_code, str(error))
        raise
    if stopped is None:
        write_starts(run, recipe)
    return recipe, stopped
